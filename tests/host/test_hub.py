"""A hub that answers, refuses, stays silent, or is not to be used."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.host.hub import check_hub, hub_address, loading_problem


@pytest.fixture(autouse=True)
def _no_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check_hub.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield
    check_hub.cache_clear()


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


def test_a_hub_that_never_answers_is_refused(mute: str) -> None:
    assert hub_address() == mute
    with pytest.raises(UserError, match=f"^owner/model is looked up on the hub, and {mute} did not answer within 1 s"):
        check_hub("owner/model", timeout_s=1)


@pytest.mark.parametrize("value", ["1", "TRUE", "yes", "On"])
def test_offline_the_hub_is_not_asked(mute: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    check_hub("owner/model", timeout_s=0.1)


def test_a_hub_that_refuses_connections_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check_hub("owner/model", timeout_s=30)


def test_the_reason_comes_before_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert loading_problem(str(tmp_path), OSError("\n no file.\nmore")) == "no file."
    assert loading_problem("none", OSError("no answer.\nmore")) == "no answer; and there is no folder 'none'"
    assert loading_problem(str(tmp_path), KeyError()) == "KeyError"
