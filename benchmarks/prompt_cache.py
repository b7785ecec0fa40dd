"""Time and memory of the prompts of a driver: `python -m benchmarks.prompt_cache`.

Prompts of about 300 tokens are loaded in three ways, each in a process of its own: the first start of a run, a later
start, and in memory. Prompts are kept in memory if JSON cannot represent a value of their rows. The clock starts after
all imports. Memory is the increase of the resident memory: without the pages of files, and these pages. Then 512 random
prompts are read, as in a step.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks.common import publish, seconds, table
from benchmarks.data_cache import make_data, resident
from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt, prompt_tokenizer
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.rl.loop.prompt_data import PromptLoader
from hpc_rl.run_dir import RunDir
from hpc_rl.training.stopping import open_stopping

STEP = 512
"""Number of prompts in a step."""
TIMEOUT_S = 6 * 3600
MEMORY = "in memory"
WAYS = ("first start", "later start", MEMORY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100_000, help="number of prompts")
    parser.add_argument("--folder", type=Path, help="where a temporary folder for the data is made")
    parser.add_argument("--driver", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.driver is not None:
        as_driver(Path(arguments.driver[0]), arguments.driver[1])
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        make_data(Path(folder), arguments.prompts)
        results = {way: measure(Path(folder), way) for way in WAYS}
    headers = ["", "seconds", "memory, MB", "pages of files, MB", f"read {STEP} prompts, ms"]
    versions = ["pyarrow", "tokenizers", "transformers"]
    publish("prompt_cache", table(headers, rows_of(results)), results, versions)


def rows_of(results: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"prompts, {way}",
            *(f"{found['seconds']:.1f}", f"{found['own']:.0f}", f"{found['files']:.0f}", f"{found['step'] * 1e3:.0f}"),
        ]
        for way, found in results.items()
    ]


def measure(folder: Path, way: str) -> dict[str, float]:
    """Return seconds and megabytes of a driver that loads the prompts in this way."""
    command = [sys.executable, "-m", "benchmarks.prompt_cache", "--driver", str(folder), way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_driver(folder: Path, way: str) -> None:
    """Load the prompts, and print seconds and megabytes."""
    config = compose(
        "ppo",
        [
            *(f"model.path={folder}/tokenizer", f"data.train_files={folder}/chats.jsonl", "data.answer_key=null"),
            *("data.max_prompt_length=2048", "reward.function=exact", "trainer.device=cpu"),
        ],
    )
    assert isinstance(config, PpoConfig)
    tokenizer, run = AutoTokenizer.from_pretrained(config.model.path), RunDir(folder / "runs" / "run")
    stopping, files = open_stopping(run, 0, []), list(config.data.train_files)
    loaded: Sequence[Prompt] = []

    def load() -> None:
        nonlocal loaded
        if way == MEMORY:
            loaded, _ = prompt_tokenizer(config.data, tokenizer)(all_rows(files, "train"))
        else:
            loaded, _ = PromptLoader(config, tokenizer, (), run, stopping).load(files, "train")

    before = resident()
    took = seconds(load)
    after = resident()
    chosen = np.random.default_rng(0).permutation(len(loaded))[:STEP]
    step = seconds(lambda: [loaded[index].text for index in chosen])
    memory = {key: (after[key] - before[key]) / 1e6 for key in after}
    print(json.dumps({"seconds": took, "step": step, **memory}))


if __name__ == "__main__":
    main()
