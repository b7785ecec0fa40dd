"""Traces of the steps of trainer.profile_steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.rl.runs.jobs import Runs


def test_each_worker_traces_the_chosen_step(run: Runs, tmp_path: Path) -> None:
    assert run(tmp_path, "trainer.profile_steps=2", "trainer.n_gpus_per_node=2") == 0
    traces = sorted((tmp_path / "profiles").rglob("*"))
    names = ["step-00000002", *(f"step-00000002/global_pool-rank{rank}.json.gz" for rank in (0, 1))]
    assert [str(path.relative_to(tmp_path / "profiles")) for path in traces] == names
    for path in traces[1:]:
        found = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"aten::mm", "Optimizer.step#AdamW.step"} <= found
