"""A hub that answers, refuses, stays silent, or is not to be used."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.formats.hub import (
    check_hub,
    data_offline,
    hub_address,
    hub_config,
    hub_offline,
    hub_problem,
    loading_problem,
)
from tests.http_server import serving


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


@pytest.mark.parametrize(
    ("values", "hub", "data"),
    [
        ({}, "", ""),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE", "HF_HUB_OFFLINE"),
        ({"TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, "", ""),
        ({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        ({"HF_DATASETS_OFFLINE": "1"}, "", "HF_DATASETS_OFFLINE"),
        ({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "0"}, "HF_HUB_OFFLINE", "HF_HUB_OFFLINE"),
    ],
)
def test_the_variable_that_keeps_the_libraries_offline(values: dict[str, str], hub: str, data: str) -> None:
    assert (hub_offline(values), data_offline(values)) == (hub, data)


def test_a_hub_that_refuses_connections_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check_hub("owner/model", timeout_s=30)


def test_the_reason_comes_before_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert loading_problem(str(tmp_path), OSError("\n no file.\nmore")) == "no file."
    assert loading_problem("none", OSError("no answer.\nmore")) == "no answer; and there is no folder 'none'"
    assert loading_problem(str(tmp_path), KeyError()) == "KeyError"


class _Hub(BaseHTTPRequestHandler):
    """Has one model, which a user with a token may read."""

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer secret"
        body = {"/owner/m/resolve/main/config.json": b'{"a": 1}', "/owner/list/resolve/main/config.json": b"[1]"}
        found = body.get(self.path) if allowed else None
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_config_is_read_from_the_hub_with_the_users_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with serving(_Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert hub_config("owner/m") == {}
        (tmp_path / "token").write_text("secret\n")
        assert hub_config("owner/m") == {"a": 1}
        assert hub_config("owner/list") == hub_config("owner/none") == hub_config("../etc") == {}
        monkeypatch.setenv("HF_TOKEN", "other")
        assert hub_config("owner/m") == {}


def test_a_config_from_a_hub_that_never_answers(mute: str) -> None:
    assert hub_config("owner/m", timeout_s=0.2) == {}


def test_what_the_hub_lacks_is_a_problem_and_a_broken_hub_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            codes = {"/owner/m/resolve/main/config.json": 200, "/api/datasets/owner/d": 200}
            codes |= {"/owner/gated/resolve/main/config.json": 403, "/owner/broken/resolve/main/config.json": 500}
            self.send_response(codes.get(self.path, 404))
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    hub_problem.cache_clear()
    with serving(Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert hub_problem("owner/m") == hub_problem("owner/broken") == hub_problem("owner/d:main", "data set") == ""
        for name, kind in (("owner/none", "model"), ("owner/gated", "model"), ("owner/m", "data set")):
            assert hub_problem(name, kind) == f"{address} has no such {kind}, or none that you may read"
    assert "cannot be reached from here (" in hub_problem("owner/other")
    hub_problem.cache_clear()
