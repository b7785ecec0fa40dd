from __future__ import annotations

import pytest

from hpc_rl.config.rl.carriers import CARRIERS
from hpc_rl.rl.actors.cluster import worker_environment
from hpc_rl.rl.carriers.transfer_queue.client import Connection
from tests.rl.ppo_config import ppo_config

VARIABLES = CARRIERS["transfer_queue"].environment


def test_its_variables_are_set_only_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = ppo_config("transfer_queue.enable=true")
    assert not VARIABLES.keys() & worker_environment(ppo_config()).keys()
    assert VARIABLES.items() <= worker_environment(config).items()
    monkeypatch.setenv("TQ_NUM_THREADS", "3")
    assert worker_environment(config)["TQ_NUM_THREADS"] == "3"


def test_a_handshake_that_fails_is_reported() -> None:
    """At the timeout, the package goes on without a connection, so the retries have to end before."""
    handshake = [f"TQ_STORAGE_HANDSHAKE_{name}" for name in ("MAX_RETRIES", "RETRY_INTERVAL", "TIMEOUT")]
    retries, interval_s, timeout_s = (int(VARIABLES[name]) for name in handshake)
    assert retries * interval_s == 600 and 600 + 0.5 * retries < timeout_s


def test_the_key_is_in_no_message() -> None:
    assert "secret" not in repr(Connection(b"secret", "controller", {}))
