from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hpc_rl.formats.offer import LentNode
from hpc_rl.formats.usage import Gpu, NodeUsage, UsageSample
from hpc_rl.tracking.dashboard import BLOCKS, RunSnapshot, printable, screen, sparkline
from hpc_rl.tracking.timeline import new_timeline

RECORDS = [
    {"step": step, "total_steps": 40, "time": 0, "train/loss": 4.0 / step, "perf/tokens_per_s": 5e4, "val/loss": None}
    for step in range(1, 21)
]


def node(rank: int, gpus: int = 8) -> NodeUsage:
    sample = UsageSample(0, 31.5, 200.0, tuple(Gpu(gpu / 7, 40.0 + gpu, 80.0) for gpu in range(gpus)))
    return NodeUsage(rank, f"gpu{rank:02}", "7", 64, 512.0, 0, 60, samples=(sample,) if rank != 1 else ())


def shown(now: RunSnapshot, width: int = 100, height: int = 30) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, height=height, color_system=None).print(screen(now, width, height))
    return stream.getvalue().splitlines()


def test_a_screen() -> None:
    log = [f"line {i}" for i in range(100)]
    text = shown(RunSnapshot("ppo-1", "RUNNING", ["job 7", "gpu[00-01]"], RECORDS, [node(0), node(1)], log))
    assert text[0].startswith("ppo-1  RUNNING  job 7 · gpu[00-01]")
    assert "step 20 of 40" in text[1] and "50k tok/s" in text[1]
    (loss,) = [line for line in text if line.startswith("loss")]
    assert "0.2" in loss and "█▄▃▂▂" in loss and "0.2 … 4" in loss
    assert not any("validation" in line for line in text)
    (first,) = [line for line in text if line.startswith("0: gpu00")]
    assert "31.5 of 64" in first and "200 of 512" in first and f"{BLOCKS} 50 %" in first and "47 of 80" in first
    assert "line 99" in text[-2] and len(text) <= 30


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (200, 60)])
def test_it_fits(width: int, height: int) -> None:
    for nodes in (0, 2, 64):
        now = RunSnapshot(
            "n" * 90, "RUNNING", ["x" * 90], RECORDS, [node(rank) for rank in range(nodes)], ["y" * 300] * 99
        )
        text = shown(now, width, height)
        assert max(map(len, text)) <= width
        assert len(text) <= max(height, 14)
        assert ("more" in "".join(text)) == (nodes == 64 and width >= 80)


def test_a_run_that_waits() -> None:
    text = shown(RunSnapshot("sft-1", "PENDING", ["Resources"], [], phase="waiting in the queue"))
    assert text[0] == "sft-1  PENDING  Resources" and text[1] == "waiting in the queue"
    assert shown(RunSnapshot("sft-1", "FAILED", [], []))[1] == "no step completed"


def test_supervised_training_shows_gradient_norm_and_learning_rate_with_units() -> None:
    records = [{**record, "train/grad_norm": 0.5, "train/lr": 1e-5} for record in RECORDS]
    text = "\n".join(shown(RunSnapshot("sft-1", "RUNNING", [], records)))
    for name, value in (("loss", r"0\.2 +per token"), ("throughput", r"50k +tokens/s")):
        assert re.search(rf"{name} +{value} +[▁▂▃▄▅▆▇█]", text), name
    assert re.search(r"gradient norm +0\.5 ", text) and re.search(r"learning rate +1e-05 ", text)


def test_a_small_screen_has_fewer_curves() -> None:
    records = [{**record, "train/grad_norm": 0.5, "train/lr": 1e-5} for record in RECORDS]
    text = "\n".join(shown(RunSnapshot("sft-1", "RUNNING", [], records), height=17))
    assert "loss" in text and "gradient norm" in text and "learning rate" in text and "throughput" not in text
    assert "learning rate" not in "\n".join(shown(RunSnapshot("sft-1", "RUNNING", [], records), height=10))


TIMELINE = new_timeline(
    20, 12.5, {"gen": [(0.0, 5.0), (10.0, 12.5)], "old_log_prob": [(4.0, 6.25)], "update_actor": [(6.25, 10.0)]}
)


def test_the_timeline_of_the_latest_step() -> None:
    text = shown(RunSnapshot("ppo-1", "RUNNING", [], RECORDS, timeline=TIMELINE, log=["end"]), width=50)
    at = next(index for index, line in enumerate(text) if line.startswith("step 20  "))
    assert [line.rstrip() for line in text[at : at + 4]] == [
        "step 20            0             12.5 s",
        "generation         ━━━━━━━━────────━━━━   7.5 s",
        "log-probabilities  ──────━━━━──────────  2.25 s",
        "policy update      ──────────━━━━━━────  3.75 s",
    ]


def test_a_small_screen_has_no_timeline() -> None:
    for height, is_there in ((17, True), (16, False)):
        text = shown(RunSnapshot("ppo-1", "RUNNING", [], RECORDS, timeline=TIMELINE, log=["end"] * 99), height=height)
        assert any(line.startswith("generation") for line in text) == is_there
        assert len(text) <= height and sum("end" in line for line in text) >= 4
    for width, is_there in ((45, True), (44, False)):
        text = shown(RunSnapshot("ppo-1", "RUNNING", [], RECORDS, timeline=TIMELINE), width=width)
        assert any(line.startswith("generation") for line in text) == is_there
    empty = new_timeline(20, 0.0, {})
    assert shown(RunSnapshot("ppo-1", "RUNNING", [], RECORDS, timeline=empty)) == shown(
        RunSnapshot("ppo-1", "RUNNING", [], RECORDS)
    )


def test_a_failed_run_is_explained() -> None:
    text = shown(RunSnapshot("sft-1", "FAILED", [], RECORDS, explanation=["Out of memory", "  fix: less"], log=["end"]))
    at = next(index for index, line in enumerate(text) if "why it failed" in line)
    assert "Out of memory" in text[at + 1] and "fix: less" in text[at + 2]


def test_a_node_without_gpus() -> None:
    text = "\n".join(shown(RunSnapshot("sft-1", "RUNNING", [], RECORDS, [node(0, gpus=0)])))
    assert "gpu00" in text and "GPU" not in text


def test_control_sequences_of_a_log_do_nothing() -> None:
    assert printable("\x1b[31mred\x1b[0m \x1b[2Jend") == r"red \x1b[2Jend"
    assert printable("\x1b]0;title\x07end").isprintable()
    assert printable("10%\r 50%\r100%") == "100%"
    assert printable("a\tb\x00c\x9bd") == r"a       b\x00c\x9bd"


@given(st.text(max_size=60))
def test_any_line_is_printable(text: str) -> None:
    assert printable(text).isprintable()


@given(st.lists(st.floats(-1e9, 1e9), max_size=200), st.integers(1, 60))
def test_any_values_are_a_line(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values)) and set(line) <= set(BLOCKS)


def test_jobs_that_lend_nodes() -> None:
    lent = [LentNode(str(job), f"node{job}", 4, 1000 - job, 0.1) for job in range(6)]
    for height in (24, 12):
        text = shown(RunSnapshot("ppo-1", "RUNNING", [], RECORDS, lent_nodes=lent, log=["end"] * 99), height=height)
        at = text.index("lent  node0 (job 0): 4 engines, 1,000 tokens, 10%")
        assert text[at + 4] == "lent  2 other jobs: 8 engines, 1,991 tokens, 20%" and len(text) <= max(height, 14)
