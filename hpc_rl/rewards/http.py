"""Scores from an HTTP endpoint. The protocol:

Each response is one request; up to `reward.workers` requests are sent at the same time:

    POST reward.url    Content-Type: application/json
    {"prompt": "...", "response": "...", "answer": ..., and the entries of reward.kwargs}

The endpoint answers with status 200 and

    {"score": 0.5}

Further numbers in the answer are components of the reward, as in a dict that a reward function returns. `prompt` is the
text after the chat template, `answer` is the row's reference answer (values that JSON lacks become text). If the
connection fails, the request is sent again, up to 3 times in total within `reward.timeout_s`, so an endpoint may
receive a request twice. Any other status or answer counts as a failure of this response. Proxies are taken from the
environment (`http_proxy`, `no_proxy`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from hpc_rl.errors import RunError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rewards.number import SCORE_KEY
from hpc_rl.rewards.worker import Result, failed, succeeded
from hpc_rl.software.proxies import proxies

_ATTEMPTS = 3
_PAUSE_S = 0.2  # before the second attempt, twice that before the third
_LONGEST_ANSWER = 1 << 20


class RewardClient:
    """One URL, to which several threads send requests."""

    def __init__(self, url: str, timeout_s: float, workers: int) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._opener = build_opener(ProxyHandler(proxies()))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._closed = threading.Event()

    def results(self, bodies: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Send the requests, and return one result for each, in order."""
        results = []
        for result in self._threads.map(self._result, bodies):
            heart.beat()
            results.append(result)
        return results

    def close(self) -> None:
        """Wait for the requests that are already sent, at most reward.timeout_s."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)

    def _result(self, body: Mapping[str, Any]) -> Result:
        data = json.dumps(body, default=str).encode()
        deadline = time.monotonic() + self._timeout_s
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return _score_in(self._post(data, deadline))
            except HTTPError as error:
                error.close()
                return failed(f"{self._url} answered {error.code} {error.reason}")
            except (OSError, HTTPException) as error:
                cause = error.reason if isinstance(error, URLError) else error
                if isinstance(cause, TimeoutError) or time.monotonic() > deadline:
                    return failed(f"{self._url} took over {self._timeout_s:g} s")
                problem = f"{self._url} cannot be reached: {cause or type(cause).__name__}"
            pause = min(_PAUSE_S * 2 ** (attempt - 1), deadline - time.monotonic())
            if attempt == _ATTEMPTS:
                break
            if self._closed.wait(max(pause, 0)):
                raise RunError("reward.url: the scorer was closed while it scored")
        return failed(problem)

    def _post(self, data: bytes, deadline: float) -> bytes:
        request = Request(self._url, data, {"Content-Type": "application/json"})
        left = max(deadline - time.monotonic(), 0.001)
        answer = b""
        with self._opener.open(request, timeout=left) as reply:
            # Each read returns as soon as there is data, so the deadline also stops a server that sends byte by byte.
            while len(answer) < _LONGEST_ANSWER and (part := reply.read1(65536)):
                answer += part
                if time.monotonic() > deadline:
                    raise TimeoutError
        return answer


def _score_in(answer: bytes) -> Result:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict) or SCORE_KEY not in found:
        return failed(f'the endpoint answered {answer[:80]!r}; expected {{"score": number}}')
    try:
        return succeeded(found)
    except ValueError as error:
        return failed(str(error))
