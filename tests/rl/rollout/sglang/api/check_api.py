"""SGLang has the API that the engine uses: read in the Python files of a wheel, which is not installed.

`make test-sglang-api` runs these checks with the wheel's folder in SGLANG_TREE.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Placement, Request, Sampling
from hpc_rl.rl.rollout.http_calls import HttpAnswer
from hpc_rl.rl.rollout.sglang.engine import SglangEngine, server_settings

SRT = Path(os.environ["SGLANG_TREE"]) / "sglang" / "srt"
ADDRESS = {"host": "127.0.0.1", "port": 20_000, "api-key": "secret"}


class Recorder:
    """Stands for a server: notes the calls, and answers them."""

    def __init__(self) -> None:
        self.client = self
        self.calls: list[tuple[str, Mapping[str, Any]]] = []

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> HttpAnswer:
        self.calls.append((path, body))
        told = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 7, None]]}
        return HttpAnswer(200, json.dumps({"success": True, "meta_info": told}).encode())

    def check_is_alive(self) -> None: ...


@pytest.fixture(scope="module")
def calls() -> dict[str, set[str]]:
    """The names in all bodies that the engine sends, by path."""
    recorder = Recorder()
    engine = SglangEngine(recorder, RolloutConfig(), [2], Placement("cuda", sleeps=True))  # type: ignore[arg-type]
    engine.add([Request(0, np.array([3], np.int32), 1, Sampling(1, top_k=3))])
    engine._send()
    engine.sleep()
    engine.load_weights([("weight", torch.zeros(2))])
    engine.wake()
    found: dict[str, set[str]] = {}
    for path, body in recorder.calls:
        found.setdefault(path, set()).update(body)
        if path == "/generate":
            found.setdefault("sampling_params", set()).update(body["sampling_params"])
    return found


def fields(file: str, name: str) -> set[str]:
    """The annotated names in a class, and in those of the file that it is derived from."""
    classes = {node.name: node for node in ast.parse((SRT / file).read_text()).body if isinstance(node, ast.ClassDef)}
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    annotated = [each.target for each in classes[name].body if isinstance(each, ast.AnnAssign)]
    own = {target.id for target in annotated if isinstance(target, ast.Name)}
    return own.union(*(fields(file, base) for base in bases))


def module(file: str) -> ModuleType:
    """A file of SGLang that imports nothing else of it."""
    spec = importlib.util.spec_from_file_location(f"sglang_{Path(file).stem}", SRT / file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # its dataclasses look for it
    spec.loader.exec_module(found)
    return found


BODIES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}


def test_every_path_is_a_route_that_takes_posts(calls: dict[str, set[str]]) -> None:
    server = (SRT / "entrypoints/http_server.py").read_text()
    assert calls.keys() == {*BODIES, "/flush_cache", "sampling_params"}
    for path in calls.keys() - {"sampling_params"}:
        route = re.search(rf'@app\.(post|api_route)\(\s*"{path}"(.*?)\)\n', server, re.DOTALL)
        assert route is not None and (route[1] == "post" or "POST" in route[2]), path
    assert '@app.get("/health")' in server


@pytest.mark.parametrize("path", BODIES)
def test_the_names_in_a_body_exist(calls: dict[str, set[str]], path: str) -> None:
    assert calls[path] and calls[path] <= fields("managers/io_struct.py", BODIES[path])


def test_the_names_of_sampling_exist(calls: dict[str, set[str]]) -> None:
    assert calls["sampling_params"] <= fields("sampling/sampling_params.py", "SamplingParams")


def test_the_names_in_an_answer_exist() -> None:
    manager = (SRT / "managers/tokenizer_manager.py").read_text()
    assert all(f'"{name}"' in manager for name in ("meta_info", "finish_reason", "output_token_logprobs"))
    batch = (SRT / "managers/schedule_batch.py").read_text()
    assert {*re.findall(r'"type": "(\w+)"', batch)} == {"stop", "length", "abort"}


def settings() -> list[dict[str, Any]]:
    placements = (Placement("cpu"), Placement("cuda"), Placement("cuda", sleeps=True, gpu_share=0.5))
    model = ModelConfig(path="model")
    return [server_settings(model, RolloutConfig(), placement) | ADDRESS for placement in placements]


def test_the_arguments_of_the_server_exist() -> None:
    files = (SRT / "arg_groups/fields").glob("*.py")
    known = {name for file in files for name in re.findall(r"^    (\w+): ", file.read_text(), re.MULTILINE)}
    for each in settings():
        assert {name.replace("-", "_") for name in each} <= known
    assert '"--config"' in (SRT / "server_args.py").read_text()


def test_the_file_with_the_arguments_is_read(tmp_path: Path) -> None:
    """By SGLang's own reader, for a parser of the same arguments."""
    parser = argparse.ArgumentParser()
    for name, value in settings()[2].items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(value))
    merger = module("utils/server_args_config_parser.py").ConfigArgumentMerger(parser)
    for each in settings():
        (tmp_path / "server.yaml").write_text(json.dumps(each))
        arguments: Sequence[str] = merger.merge_config_with_args(["--config", str(tmp_path / "server.yaml")])
        found = vars(parser.parse_args(arguments))
        assert {name: found[name.replace("-", "_")] for name in each} == each


def test_the_key_opens_everything_and_health_needs_none() -> None:
    auth = module("utils/auth.py")

    def allowed(path: str, key: str | None, level: str) -> bool:
        header = None if key is None else f"Bearer {key}"
        answer = auth.decide_request_auth(
            method="POST", path=path, authorization_header=header, api_key="secret", admin_api_key=None,
            auth_level=auth.AuthLevel(level),
        )  # fmt: skip
        return bool(answer.allowed)

    for level in ("normal", "admin_optional"):
        assert allowed("/generate", "secret", level)
        assert not allowed("/generate", "guess", level) and not allowed("/generate", None, level)
    assert allowed("/health", None, "normal")
