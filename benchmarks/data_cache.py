"""Time and memory of tokenized data, compared with `datasets.map`: `python -m benchmarks.data_cache`.

Chats with two messages and about 300 tokens are tokenized with the same function in three ways, each with the same
number of processes: the first start of a run, a later start, and `datasets.map` over the same jsonl file. The ranks are
processes that meet as those of a job do, and wait for each other before the clock starts, with all imports done. Memory
is what one rank has more than before it opened the data: resident memory without the pages of files, and these pages.
A row of the table is the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.common import publish, seconds, table
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.data.reading.sources import BLOCK_ROWS
from hpc_rl.data.sft_dataset import Sample, chat_tokenizer
from hpc_rl.finetune.dataset import load_items
from hpc_rl.finetune.sft import Sft
from hpc_rl.probes.tiny_model import make_tokenizer
from hpc_rl.run_dir import RunDir
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import open_stopping

TOKENS = 300
TIMEOUT_S = 6 * 3600
FIRST, LATER, MAP = "hpc-rl, first start", "hpc-rl, later start", "datasets.map"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where a temporary folder for the data is made")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_in is not None:
        as_rank(arguments.rank_in)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(Path(folder), arguments.rows, arguments.ranks)
    headers = ["", "seconds", "memory, MB", "pages of files, MB"]
    versions = ["datasets", "pyarrow", "tokenizers", "transformers"]
    publish("data_cache", table(headers, rows_of(results)), results, versions)


def rows_of(results: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [name, f"{found['seconds']:.1f}", *(f"{found[key]:.0f}" if key in found else "" for key in ("own", "files"))]
        for name, found in results.items()
    ]


def measure(folder: Path, rows: int, ranks: int) -> dict[str, dict[str, float]]:
    """Return seconds, and for the ranks megabytes, of each way."""
    make_data(folder, rows)
    results = {name: slowest(folder, ranks) for name in (FIRST, LATER)}
    return {**results, MAP: {"seconds": map_seconds(folder, ranks)}}


def make_data(folder: Path, rows: int) -> None:
    """Write a tokenizer, and chats of random words with about TOKENS tokens."""
    make_tokenizer(4096).save_pretrained(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, int(rng.integers(2, 9)))) for _ in range(5000)])
    per_word = len(tokenizer(" ".join(words[:500]))["input_ids"]) / 500
    lengths = rng.gamma(4.0, TOKENS / per_word / 8, (rows, 2)).astype(int) + 1
    with (folder / "chats.jsonl").open("w") as file:
        for asked, answered in lengths:
            texts = [" ".join(rng.choice(words, count)) for count in (asked, answered)]
            roles = zip(("user", "assistant"), texts, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")


def config_of(folder: Path) -> SftConfig:
    data = {"train_files": [str(folder / "chats.jsonl")], "max_length": 4 * TOKENS}
    return SftConfig(model=ModelConfig(path=str(folder / "tokenizer")), data=data)  # type: ignore[arg-type]


def slowest(folder: Path, ranks: int) -> dict[str, float]:
    """Start the ranks of a run, and return the largest of their seconds and megabytes."""
    with tempfile.TemporaryDirectory(dir=folder) as group:
        environ = {**os.environ, "WORLD_SIZE": str(ranks), "HPC_RL_GROUP_DIR": group}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.data_cache", "--rank-in", str(folder)],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    found: list[dict[str, float]] = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {key: max(one[key] for one in found) for key in found[0]}


def as_rank(folder: Path) -> None:
    """Open the data as a rank of a run, and print seconds and megabytes."""
    config, run = config_of(folder), RunDir(folder / "runs" / "run")
    world = distributed.start("cpu", start_timeout_s=300)
    objective = Sft(config)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.model.path)
    stopping = open_stopping(run, 0, [])
    world.barrier()
    before = resident()
    took = seconds(lambda: open_and_read(objective, tokenizer, run, world, stopping))
    after = resident()
    print(json.dumps({"seconds": took, **{key: (after[key] - before[key]) / 1e6 for key in after}}))
    distributed.finish()


def open_and_read(objective: Sft, tokenizer: Any, run: RunDir, world: World, stopping: Any) -> None:
    """Open the data, and read a batch of it."""
    files = objective.config.data.train_files
    items = load_items(objective, list(files), tokenizer, "train", run, world, stopping)
    order = np.random.default_rng(0).permutation(len(items))
    KEPT.append((items, sum(len(items[index].input_ids) for index in order[:64])))


KEPT: list[Any] = []
"""The open data, so that its memory counts."""


def resident() -> Mapping[str, int]:
    """Return the resident memory of this process in bytes: its own, and pages of files (proc(5), status)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"own": found["RssAnon"] + found["RssShmem"], "files": found["RssFile"]}


def map_seconds(folder: Path, processes: int) -> float:
    """Return the seconds of `datasets.map` with our tokenization, for the same file."""
    import datasets

    config = config_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenize = chat_tokenizer(config.data, tokenizer)

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found, _ = tokenize([({"messages": messages}, "a row") for messages in batch["messages"]])
        kept: list[Sample] = [sample for sample in found if sample is not None]
        return {"input_ids": [one.input_ids for one in kept], "loss_mask": [one.loss_mask for one in kept]}

    def run() -> None:
        loaded = datasets.load_dataset(
            "json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=str(folder / "datasets")
        )
        loaded.map(encode, batched=True, batch_size=BLOCK_ROWS, num_proc=processes, remove_columns=["messages"])

    return seconds(run)


if __name__ == "__main__":
    main()
