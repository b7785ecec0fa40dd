"""A server that speaks the part of SGLang's HTTP API that the engine `sglang` uses, with a real model on a CPU.

    python -m sglang.launch_server --config FILE

It takes the place of SGLang, which needs a GPU. Names and behaviour follow SGLang's documentation and its files
python/sglang/srt/entrypoints/http_server.py and python/sglang/srt/managers/io_struct.py (version 0.5.23). As in SGLang,
prompts stay in a cache until it is flushed, released weights are lost, an update waits until no request is left, and a
seed counts only with enable-deterministic-inference.

Its further arguments cause trouble: `ends-at-start`, `never-ready`, `hangs` (at the first request), `dies-after` (so
many responses), `fails-after` (so many responses), `leaves-child`, `bad-update`, `step-s` (of each token). With
`holds-after` (so many requests), further ones wait after their first token until the first call that aborts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


@dataclass
class Server:
    """The model, and the requests that are running."""

    arguments: dict[str, Any]
    model: Any
    lock: threading.RLock = field(default_factory=threading.RLock)
    running: int = 0
    aborted_before: int = 0
    """Requests with a smaller number are aborted."""
    count: int = 0
    answered: int = 0
    cache: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Logits after a prompt, with the weights of its first request."""
    released: set[str] = field(default_factory=set)

    has_held: bool = False

    @property
    def holds_after(self) -> int:
        return int(self.arguments.get("holds-after", 1 << 30))

    @property
    def hangs(self) -> bool:
        return bool(self.arguments.get("hangs"))

    @torch.inference_mode()
    def logits(self, ids: list[int], is_prompt: bool) -> torch.Tensor:
        with self.lock:
            known = self.cache.get(tuple(ids))
            if known is None:
                known = self.model(torch.tensor([ids])).logits[0, -1].float()
                if is_prompt:
                    self.cache[tuple(ids)] = known
            return known.clone()

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if self.released:
                return 500, {"error": {"message": f"released: {sorted(self.released)}"}}
            number, self.count = self.count, self.count + 1
            self.running += 1
        try:
            return self.respond(number, body)
        finally:
            with self.lock:
                self.running -= 1
                self.answered += 1

    def respond(self, number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, sampling = list(body["input_ids"]), body["sampling_params"]
        length = self.arguments.get("context-length", 10_000)
        if len(ids) >= length:
            return 400, {"error": {"message": f"The input ({len(ids)} tokens) is longer than the model's context"}}
        limit = min(sampling["max_new_tokens"], length - len(ids))
        ends = {*sampling["stop_token_ids"], self.model.config.eos_token_id}
        steps: list[list[Any]] = []
        reason: dict[str, Any] | None = None
        while reason is None:
            if number < self.aborted_before and not steps:
                reason = {"type": "abort", "message": "Abort"}
                break
            token, logprob = self.drawn(self.logits(ids, is_prompt=not steps), sampling, len(ids))
            ids.append(token)
            steps.append([logprob, token, None])
            if number < self.aborted_before:  # SGLang looks at this first, after one more token
                reason = {"type": "abort", "message": "Abort"}
            elif token in ends:
                reason = {"type": "stop", "matched": token}
            elif len(steps) == limit:
                reason = {"type": "length", "length": limit}
            time.sleep(self.arguments.get("step-s", 0))
            while reason is None and number >= self.holds_after and not self.aborted_before:
                self.has_held or print("a response waits", flush=True)
                self.has_held = True
                time.sleep(0.01)
        told: dict[str, Any] = {"finish_reason": reason, "completion_tokens": len(steps)}
        if body.get("return_logprob"):
            told["output_token_logprobs"] = steps
        return 200, {"text": "", "output_ids": [step[1] for step in steps], "meta_info": told}

    def drawn(self, logits_V: torch.Tensor, sampling: dict[str, Any], position: int) -> tuple[int, float]:
        """Draw a token; its log-probability is that before top_p and top_k."""
        temperature = sampling["temperature"]
        logprobs_V = torch.log_softmax(logits_V / (temperature or 1.0), dim=0)
        if temperature == 0:
            token = int(logprobs_V.argmax())
            return token, float(logprobs_V[token])
        probs_V, order_V = logprobs_V.exp().sort(descending=True)
        kept_V = (probs_V.cumsum(0) - probs_V) < sampling["top_p"]
        if sampling["top_k"] > 0:
            kept_V &= torch.arange(len(probs_V)) < sampling["top_k"]
        generator = torch.Generator()
        if self.arguments.get("enable-deterministic-inference"):
            generator.manual_seed((sampling["sampling_seed"] * 1_000_003 + position) % 2**63)
        else:
            generator.seed()
        token = int(order_V[torch.multinomial(probs_V * kept_V, 1, generator=generator)])
        return token, float(logprobs_V[token])

    def abort(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["abort_all"]
        with self.lock:
            self.aborted_before = self.count
        return 200, {}

    def flush(self) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if self.running:
                return 400, {"message": "there are running requests"}
            self.cache.clear()
        return 200, {}

    def update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["load_format"] == "safetensors"
        while True:
            with self.lock:
                if not self.running:
                    break
            time.sleep(0.01)
        with self.lock:
            if "weights" in self.released:
                return 500, {"error": {"message": "the weights are released"}}
            if self.arguments.get("bad-update"):
                return 400, {"success": False, "message": "size mismatch"}
            tensors = {}
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                tensors |= load_file(file)
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in tensors.items():
                    parameters[name].copy_(tensor)
            if body.get("flush_cache", True):
                self.cache.clear()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def release(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if self.running:
                return 500, {"error": {"message": "release_memory_occupation should be called when server is idle"}}
            if not self.arguments.get("enable-memory-saver"):
                return 500, {"error": {"message": "memory saver is not enabled"}}
            self.released |= {*body["tags"]}
            if "kv_cache" in self.released:
                self.cache.clear()
            if "weights" in self.released:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.fill_(float("nan"))
        return 200, {}

    def resume(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.released -= {*body["tags"]}
        return 200, {}


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Handler(BaseHTTPRequestHandler):
    server_state: Server

    def do_GET(self) -> None:
        state = self.server_state
        is_ready = self.path == "/health" and state.model is not None and not (state.hangs and state.count)
        self.reply(200 if is_ready else 503, {})

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {state.arguments['api-key']}":
            self.reply(401, {"error": "Unauthorized"})
            return
        if self.path == "/generate":
            if state.hangs:
                state.count += 1
                threading.Event().wait()
            if state.answered >= state.arguments.get("dies-after", 1 << 30):
                print("no space left on this planet", flush=True)
                os._exit(7)
            if state.answered >= state.arguments.get("fails-after", 1 << 30):
                self.reply(500, {"error": {"message": "an error of the scheduler"}})
                return
            self.reply(*state.generate(body))
            return
        calls = {
            "/abort_request": lambda: state.abort(body),
            "/flush_cache": state.flush,
            "/update_weights_from_disk": lambda: state.update(body),
            "/release_memory_occupation": lambda: state.release(body),
            "/resume_memory_occupation": lambda: state.resume(body),
        }
        self.reply(*calls[self.path]())

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def main(config: str) -> None:
    arguments = json.loads(Path(config).read_text())  # JSON is YAML
    print(f"server_args={arguments}", flush=True)
    print(f"again, {arguments['api-key']}{arguments['api-key']}", flush=True)
    if arguments.get("leaves-child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"], start_new_session=True)
        Path(arguments["leaves-child"]).write_text(str(child.pid))
    if text := arguments.get("ends-at-start"):
        print(text, flush=True)
        sys.exit(3)
    state = Server(arguments, None)
    Handler.server_state = state
    server = Listener((arguments["host"], arguments["port"]), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not arguments.get("never-ready"):
        dtype = getattr(torch, arguments["dtype"])
        state.model = AutoModelForCausalLM.from_pretrained(arguments["model-path"], dtype=dtype).eval()
        print("The server is fired up and ready to roll!", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    assert sys.argv[1] == "--config"
    main(sys.argv[2])
