"""A stand-in for the W&B server: the few answers that uploading a run needs, and a memory of what came."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import serving


class WandbServer:
    """What runs sent: history lines by place, and every request's path and key."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        self.requests: list[tuple[str, str | None]] = []
        self.names: dict[str, str] = {}
        self.status = 200
        """HTTP status of every answer from now on."""
        self.url = ""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        asked = json.loads(body) if body.startswith(b"{") else {}
        if path.endswith("/file_stream"):
            self._keep(path.split("/")[-2], asked)
        if self.status != 200:
            return {"errors": [{"message": "the key is not known here"}]}
        query, given = asked.get("query", ""), asked.get("variables", {})
        if "mutation UpsertBucket" in query:
            self.names[given["name"]] = given.get("displayName") or self.names.get(given["name"], "")
            return {"data": {"upsertBucket": {"bucket": self._bucket(given["name"]), "inserted": True}}}
        if "query RunResumeStatus" in query:
            model = {"id": "p1", "name": "p", "entity": {"id": "e1", "name": "me"}}
            return {"data": {"model": {**model, "bucket": self._resumable(given["name"])}}}
        if "mutation CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
            return {"data": {"createRunFiles": {"runID": "b1", "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _keep(self, run: str, asked: dict[str, Any]) -> None:
        part = asked.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        for place, line in enumerate(part["content"], start=part["offset"]):
            self.history[run][place] = json.loads(line)

    def _bucket(self, run: str) -> dict[str, Any]:
        project = {"id": "p1", "name": "p", "entity": {"id": "e1", "name": "me"}}
        shown = {"displayName": self.names[run], "sweepName": None, "config": "{}", "description": None}
        return {"id": "b1", "name": run, "historyLineCount": len(self.history[run]), "project": project, **shown}

    def _resumable(self, run: str) -> dict[str, Any] | None:
        lines = [json.dumps(line) for _, line in sorted(self.history[run].items())]
        if not lines:
            return None
        counts = {"logLineCount": 0, "historyLineCount": len(lines), "eventsLineCount": 0}
        texts = {"summaryMetrics": lines[-1], "historyTail": json.dumps(lines[-1:]), "eventsTail": "[]", "config": "{}"}
        more = {"tags": [], "notes": None, "wandbConfig": "{}", "displayName": self.names[run]}
        return {"id": "b1", "name": run, **counts, **texts, **more}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """The server, for as long as the block lasts; also a proxy, since it takes any address that is asked of it."""
    state = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            state.requests.append((self.path, self.headers.get("Authorization")))
            text = json.dumps(state.answer(self.path, body)).encode()
            self.send_response(state.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *_: Any) -> None: ...

    with serving(Handler) as state.url:
        yield state
