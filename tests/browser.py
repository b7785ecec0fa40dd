"""A headless Chromium, spoken to over two pipes (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 600


def missing() -> str | None:
    """Why there is no browser here, or None where there is one."""
    if any(map(shutil.which, NAMES)):
        return None
    return f"no browser ({', '.join(NAMES)}) on PATH: .ci/install-chromium brings one in"


class Browser:
    """One page. Its errors and warnings are collected in `complaints`, its requests for other addresses in `asked`."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        program = next(filter(None, map(shutil.which, NAMES)))
        # As root, and in a container with a small /dev/shm.
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
        command = f'exec "$0" {flags} --remote-debugging-pipe --user-data-dir="$1" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, str(profile)],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._last = 0
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def show(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False, fragment: str = "") -> None:
        """Load a file, and wait until it is there."""
        self.complaints, self.asked = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # a change of the fragment alone would load nothing
        self.call("Page.navigate", url=page.absolute().as_uri() + fragment)
        deadline = time.monotonic() + TIMEOUT_S
        while self.value("document.readyState + location.href.split('#')[0]") != f"complete{page.absolute().as_uri()}":
            assert time.monotonic() < deadline, f"{page} does not load"

    def value(self, script: str) -> Any:
        """What an expression is in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self) -> bytes:
        """All of the page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            new = os.read(self._read, 1 << 20)
            assert new, f"the browser ended with exit code {self._process.wait()}"
            self._unread += new
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif event == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
