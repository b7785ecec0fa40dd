"""A stand-in for the Hugging Face hub: serves folders as repositories, by the few requests that a download makes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_server import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(revision|tree|paths-info)/[^/]+(?:/(.*))?)?")
_FILE = re.compile(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)")


class HubServer:
    def __init__(self, models: Mapping[str, Path], datasets: Mapping[str, Path]) -> None:
        self.repositories = {"models": dict(models), "datasets": dict(datasets)}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.url = ""

    def info(self, kind: str, name: str) -> dict[str, Any]:
        files = [{"rfilename": entry["path"]} for entry in self.entries(self.repositories[kind][name])]
        return {"_id": "1", "id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": [], "gated": False}

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
def hub_server(models: Mapping[str, Path], datasets: Mapping[str, Path]) -> Iterator[HubServer]:
    """The server, for as long as the block lasts."""
    state = HubServer(models, datasets)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            state.asked.append(f"{self.command} {path}")
            if found := _FILE.fullmatch(path):
                self.send_repository_file("datasets" if found[1] else "models", found[2], found[3])
            elif found := _API.fullmatch(path):
                self.send_listing(found[1], found[2], found[3] or "revision", found[4] or "", body)
            else:
                self.send(404, b"", {})

        do_GET = do_POST = do_HEAD = handle_any

        def send_listing(self, kind: str, name: str, what: str, below: str, body: bytes) -> None:
            folder = state.repositories[kind].get(name)
            if folder is None:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            entries = state.entries(folder)
            if what == "revision":
                self.send_json(state.info(kind, name))
            elif what == "tree":
                self.send_json([entry for entry in entries if entry["path"].startswith(below)])
            else:
                wanted = parse_qs(body.decode()).get("paths", [])
                self.send_json([entry for entry in entries if entry["path"] in wanted])

        def send_repository_file(self, kind: str, name: str, file: str) -> None:
            folder = state.repositories[kind].get(name)
            if folder is None or not (folder / file).is_file():
                code = "RepoNotFound" if folder is None else "EntryNotFound"
                self.send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
            elif name in state.gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"})
            else:
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(folder / file)}"', "Accept-Ranges": "bytes"}
                self.send(200, (folder / file).read_bytes(), headers)

        def send_json(self, answer: Any) -> None:
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with serving(Handler) as state.url:
        yield state
