"""An engine with a server of ours that speaks SGLang's HTTP API (tests/rl/rollout/sglang/api) and has a real model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.rl.rollout.engine import Completion, Placement, Sampling, complete
from hpc_rl.rl.rollout.sglang.engine import SglangEngine, load
from tests.rl.ppo_config import ppo_config
from tests.rl.rollout.tiny_engine import prompts, sharp_model

SERVERS = Path(__file__).with_name("api")
"""The folder that has to be in PYTHONPATH while an engine starts."""
EOS = range(12)
"""Several tokens, so that some responses end early."""


def make_model(folder: Path) -> Path:
    """Write a model, and return its folder."""
    sharp_model(folder).hf.save_pretrained(folder)
    return folder


@contextmanager
def started(folder: Path, *options: str, sleeps: bool = False, log: Path | None = None) -> Iterator[SglangEngine]:
    config = ppo_config(
        "rollout.name=sglang", f"model.path={folder}", "rollout.max_num_seqs=4", "trainer.device=cpu", *options
    )
    placement = Placement("cpu", sleeps=sleeps, log=log or folder.with_name("server.log"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SERVERS), prepend=os.pathsep)
        engine = load(config, EOS, placement, None)
    try:
        yield engine
    finally:
        engine.close()


def respond(engine: SglangEngine, seeds: Sequence[int] = range(7), **sampling: Any) -> list[Completion]:
    return complete(engine, prompts(), list(seeds), Sampling(**{"max_new_tokens": 12, **sampling}))
