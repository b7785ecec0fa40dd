"""`generate` with a server that others operate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.data.arithmetic import generate
from hpc_rl.errors import UserError
from hpc_rl.rl.actors.pools import release_pools
from hpc_rl.rl.generation.responses import read_responses
from hpc_rl.rl.generation.run import run_generation
from hpc_rl.run_dir import RunDir
from tests.helpers import make_tiny_model
from tests.http_server import serving
from tests.rl.rollout.test_openai import Server

PROMPTS, N = 5, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai")
    generate(folder, n_train=PROMPTS, n_val=1)
    make_tiny_model(folder / "model")
    return folder


def run(folder: Path, run_dir: Path, url: str, *options: str) -> int:
    config = compose(
        "generate",
        [
            *(f"model.path={folder}/model", f"data.files={folder}/train.jsonl", "trainer.device=cpu"),
            *("data.max_prompt_length=40", "data.max_response_length=6", f"rollout.n={N}", "rollout.max_num_seqs=4"),
            *("rollout.name=openai", f"rollout.openai.base_url={url}/v1", "trainer.logger=[]", *options),
        ],
    )
    assert isinstance(config, GenerateConfig)
    logs = run_dir / "attempt-1"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        return run_generation(config, RunDir(run_dir), logs)
    finally:
        release_pools(str(logs))


def test_responses_of_a_server_are_written(cluster: None, folder: Path, tmp_path: Path) -> None:
    """It is busy at first, and its log-probabilities are sums of -1."""

    def respond(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 0:
            return 503, {"error": "busy"}
        logprobs = {"token_logprobs": [-1] * 3}
        choice = {"token_ids": [5, 6, body["seed"] % 300], "finish_reason": "stop", "logprobs": logprobs}
        return 200, {"choices": [choice]}

    server = Server(respond)
    with serving(server.handler()) as url:
        assert run(folder, tmp_path, url) == 0
    assert len(server.bodies) == PROMPTS * N + 1
    rows = list(read_responses(tmp_path / "responses.jsonl"))
    assert len(rows) == PROMPTS * N and {row["logprob"] for row in rows} == {-3.0}
    assert {row["finish"] for row in rows} == {"stopped"} and {row["tokens"] for row in rows} == {3}
    seeds = {body["seed"] for body in server.bodies}
    assert len(seeds) == PROMPTS * N, "a request that is repeated has the same seed"


def test_a_refusal_ends_the_run_with_its_reason(cluster: None, folder: Path, tmp_path: Path) -> None:
    server = Server(lambda body, number: (403, {"error": "no budget is left"}))
    with serving(server.handler()) as url, pytest.raises(UserError, match="answered 403: no budget is left; check the"):
        run(folder, tmp_path, url)
