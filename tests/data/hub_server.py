"""A stand-in for the Hugging Face hub: serves folders as repositories, by the few requests that a download or a stream
makes. It counts what it serves, and can fail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_server import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_FILE = re.compile(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


class HubServer:
    def __init__(self, models: Mapping[str, Path], datasets: Mapping[str, Path]) -> None:
        self.repositories = {"models": dict(models), "datasets": dict(datasets)}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.commits = [COMMIT]
        """The last one is that of the branch main. All have the same files."""
        self.served: Counter[str] = Counter()
        """Bytes sent of each file of a repository, by its path there."""
        self.failing = 0
        """Number of the next requests for repositories that are answered with "503 Service Unavailable"."""
        self.mute: set[str] = set()
        """Files of data sets that are not sent: their requests get no answer."""
        self.url = ""

    def commit_of(self, revision: str) -> str | None:
        """The commit of a branch or commit; None if there is none."""
        commit = self.commits[-1] if revision == "main" else revision
        return commit if commit in self.commits else None

    def info(self, kind: str, name: str, commit: str) -> dict[str, Any]:
        files = [{"rfilename": entry["path"]} for entry in self.entries(self.repositories[kind][name])]
        return {
            "_id": "1",
            "id": name,
            "sha": commit,
            "siblings": files,
            "private": False,
            "tags": [],
            "gated": False,
        }

    @staticmethod
    def entries(folder: Path) -> list[dict[str, Any]]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": _etag(path)}
            for path in files
        ]


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub_server(
    models: Mapping[str, Path], datasets: Mapping[str, Path], host: str = "127.0.0.1"
) -> Iterator[HubServer]:
    """The server, for as long as the block lasts."""
    state = HubServer(models, datasets)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            state.asked.append(f"{self.command} {path}")
            while path.rpartition("/")[2] in state.mute:
                time.sleep(0.05)
            is_known = _FILE.fullmatch(path) or _API.fullmatch(path)
            if is_known and state.failing:
                state.failing -= 1
                self.send(503, b"", {})
            elif found := _FILE.fullmatch(path):
                self.send_repository_file("datasets" if found[1] else "models", *found.groups()[1:])
            elif found := _API.fullmatch(path):
                kind, name, what, revision, below = found.groups()
                self.send_listing(kind, name, what or "revision", revision or "main", below or "", body)
            else:
                self.send(404, b"", {})

        do_GET = do_POST = do_HEAD = handle_any

        def send_listing(self, kind: str, name: str, what: str, revision: str, below: str, body: bytes) -> None:
            folder = state.repositories[kind].get(name)
            commit = state.commit_of(revision)
            if folder is None or commit is None:
                code = "RepoNotFound" if folder is None else "RevisionNotFound"
                self.send(404, b"{}", {"X-Error-Code": code})
                return
            entries = state.entries(folder)
            if what == "revision":
                self.send_json(state.info(kind, name, commit))
            elif what == "tree":
                self.send_json([entry for entry in entries if entry["path"].startswith(below)])
            else:
                wanted = parse_qs(body.decode()).get("paths", [])
                self.send_json([entry for entry in entries if entry["path"] in wanted])

        def send_repository_file(self, kind: str, name: str, revision: str, file: str) -> None:
            folder = state.repositories[kind].get(name)
            commit = state.commit_of(revision)
            if folder is None or commit is None:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound" if folder is None else "RevisionNotFound"})
            elif not (folder / file).is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            elif name in state.gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"})
            else:
                headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(folder / file)}"', "Accept-Ranges": "bytes"}
                body, status = (folder / file).read_bytes(), 200
                if wanted := _RANGE.fullmatch(self.headers.get("Range", "")):
                    start, end = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
                    headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
                    body, status = body[start : end + 1], 206
                if self.command == "GET":
                    state.served[file] += len(body)
                self.send(status, body, headers)

        def send_json(self, answer: Any) -> None:
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that did not wait
                    self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with serving(Handler, host) as state.url:
        yield state
