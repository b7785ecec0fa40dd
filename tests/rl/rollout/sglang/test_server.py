"""The server of the engine `sglang`: its start, its end, and what happens if it fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler

import pytest

from hpc_rl.errors import RunError
from hpc_rl.rl.rollout.engine import Placement, Sampling, complete
from hpc_rl.rl.rollout.http_calls import HttpClient
from hpc_rl.rl.rollout.sglang import engine as sglang
from hpc_rl.rl.rollout.sglang import server as sglang_server
from hpc_rl.rl.rollout.sglang.engine import SglangEngine, server_settings
from tests.rl.ppo_config import ppo_config
from tests.rl.rollout.sglang.engines import make_model, respond, started
from tests.rl.rollout.tiny_engine import prompts
from tests.system.test_processes import is_alive, until

DEADLINE_S = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sglang") / "model")


def ended_engine(engine: SglangEngine) -> int:
    """Generate until the engine ends its process; return the exit code."""
    with pytest.raises(SystemExit) as caught:
        respond(engine)
    assert engine._server._process.poll() is not None
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.long
def test_a_server_that_dies_ends_the_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(folder, "+rollout.engine_kwargs.dies_after=2") as engine:
        assert ended_engine(engine) == 7
    printed = capsys.readouterr().out
    assert "its exit code was 7" in printed and "no space left on this planet" in printed


@pytest.mark.long
def test_a_server_that_fails_ends_with_its_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(folder, "+rollout.engine_kwargs.fails_after=2") as engine:
        assert ended_engine(engine) == 1
    assert "/generate: the server answered 500: an error of the scheduler" in capsys.readouterr().out


def test_a_server_that_hangs_ends_with_its_engine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "PROBE_S", 0.1)
    with started(folder, "+rollout.engine_kwargs.hangs=true", "rollout.stall_s=2") as engine:
        assert ended_engine(engine) == 1
    assert "no response, and no answer to /health, for " in capsys.readouterr().out


@pytest.mark.long
def test_a_slow_server_is_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers /health while it generates, although no response is complete for longer than the limit."""
    monkeypatch.setattr(sglang, "PROBE_S", 0.1)
    with started(folder, "+rollout.engine_kwargs.step_s=1", "rollout.stall_s=3") as engine:
        (found,) = complete(engine, prompts()[:1], [0], Sampling(6, temperature=0.0))
        assert found.finished or len(found.token_ids) == 6


def test_a_server_that_does_not_start_in_time_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "START_SHARE", 0.001)
    message = (
        r"sglang\.launch_server was not ready within 2 s \(.*\): raise trainer\.model_timeout_s, or use another engine"
    )
    with (
        pytest.raises(RunError, match=message),
        started(folder, "+rollout.engine_kwargs.never_ready=true", "trainer.model_timeout_s=1800"),
    ):
        pass


def test_a_server_that_ends_at_its_start_is_shown_with_its_log(folder: Path, tmp_path: Path) -> None:
    log, own = tmp_path / "node0-engine0-server.log", tmp_path / "node0-engine0.log"
    text = "unrecognized arguments: --no-such-option"
    with pytest.raises(RunError) as caught, started(folder, f"+rollout.engine_kwargs.ends_at_start='{text}'", log=own):
        pass
    assert str(caught.value).startswith("rollout.name=sglang: python -m sglang.launch_server ended with exit code 3: ")
    assert f"the end of {log}:" in str(caught.value) and text in str(caught.value)
    assert "again, ****" in str(caught.value) and "'api-key': '****" in str(caught.value)
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_the_server_and_its_children_end_with_the_engine(folder: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    with started(folder, f"+rollout.engine_kwargs.leaves_child={child}") as engine:
        pids = [engine._server._process.pid, int(child.read_text())]
        assert all(map(is_alive, pids)) and os.getpgid(pids[0]) != os.getpgid(0)
    until(lambda: not any(map(is_alive, pids)))


def test_the_server_and_its_children_end_with_an_engine_that_is_killed(folder: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "import time; from pathlib import Path; from tests.rl.rollout.sglang.engines import started\n"
        f"with started(Path({str(folder)!r}), '+rollout.engine_kwargs.leaves_child={child}') as engine:\n"
        "    print(engine._server._process.pid, flush=True); time.sleep(100000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = threading.Timer(DEADLINE_S, process.kill)
        watch.start()
        pids = [int(process.stdout.readline()), int(child.read_text())]
        watch.cancel()
        assert all(map(is_alive, pids))
        process.kill()
    until(lambda: not any(map(is_alive, pids)))


def test_only_the_engine_can_use_its_server_and_ends_if_it_is_killed(folder: Path) -> None:
    """The arguments of a process are no secret on a node."""
    with started(folder) as engine:
        check_key(engine)
        engine._server._process.send_signal(signal.SIGKILL)
        assert ended_engine(engine) == 137


def check_key(engine: SglangEngine) -> None:
    client, log = engine._server.client, engine._server._log
    key = client._key
    assert log is not None
    shown = log.read_text()
    assert key not in shown and f"'api-key': '{'*' * len(key)}'" in shown and "ready to roll!" in shown
    assert key is not None and len(key) > 30 and client.url.startswith("http://127.0.0.1:")
    for other in (None, "guess"):
        assert HttpClient(client.url, other, ProxyHandler({})).post("/flush_cache", {}, 60).status == 401
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            assert key.encode() not in process.read_bytes()


def test_ports_are_free_and_below_the_ephemeral_range() -> None:
    ports = {sglang_server.free_port() for _ in range(20)}
    assert len(ports) > 15 and all(10_000 <= port < 32_768 for port in ports)


def test_settings_by_placement(folder: Path) -> None:
    def settings(placement: Placement, *options: str) -> dict[str, Any]:
        device = f"trainer.device={placement.device}"
        config = ppo_config("rollout.name=sglang", f"model.path={folder}", device, *options)
        return server_settings(config.model, config.rollout, placement)

    cpu = settings(Placement("cpu"))
    shared = settings(Placement("cuda", sleeps=True, gpu_share=0.5))
    alone = settings(Placement("cuda"))
    assert (cpu["dtype"], shared["dtype"], cpu["device"]) == ("float32", "bfloat16", "cpu")
    assert shared["enable-memory-saver"] and not alone["enable-memory-saver"] and "enable-memory-saver" not in cpu
    assert shared["mem-fraction-static"] == 0.5 and not {"mem-fraction-static"} & ({*alone} | {*cpu})
    assert settings(Placement("cuda"), "rollout.gpu_memory_utilization=0.7")["mem-fraction-static"] == 0.7
    own = settings(
        Placement("cpu"), "+rollout.engine_kwargs={attention_backend: triton, max_running_requests: 3, dtype: null}"
    )
    assert own["attention-backend"] == "triton" and own["max-running-requests"] == 3 and "dtype" not in own
    json.dumps(own)
