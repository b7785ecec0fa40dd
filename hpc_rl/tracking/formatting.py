"""Metrics as short text, for log lines, the progress display and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpc_rl.tracking.metrics import Record


def number(value: float) -> str:
    """Format with at most four digits: 0.8312, 12.3k, 4.56M, 1.2e-05."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}" if size < 1e-3 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format seconds as 0:42, 12:05, 3:04:05 or 2-03:04:05 (days first, as in Slurm)."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def hours(amount: float, lent: float = 0.0) -> str:
    """Format node hours: 0.054, 0.31, 12.5; with those that other jobs lent, 12.5 + 3.40 lent."""
    if lent:
        return f"{hours(amount)} + {hours(lent)} lent"
    return f"{amount:.1f}" if amount >= 10 else f"{amount:.2f}" if amount >= 0.1 else f"{amount:.3f}"


def rates(record: Record) -> list[str]:
    """Return speed, memory and remaining time, as far as the record has them."""
    texts: dict[str, Callable[[float], str]] = {
        "perf/responses_per_s": lambda v: f"{number(v)} responses/s",
        "perf/tokens_per_s": lambda v: f"{number(v)} tok/s",
        "perf/throughput": lambda v: f"{number(v)} tok/s each",
        "perf/mfu": lambda v: f"MFU {100 * v:.1f}%",
        "perf/mfu/actor": lambda v: f"MFU {100 * v:.1f}%",
        "perf/max_memory_gb": lambda v: f"{v:.1f} GB",
        "perf/eta_s": lambda v: f"ETA {duration(v)}",
    }
    return [text(record[key]) for key, text in texts.items() if record.get(key) is not None]


_LEARNING = {
    "train/loss": "loss",
    "val/loss": "val loss",
    "train/lr": "lr",
    "train/grad_norm": "grad",
    "critic/score/mean": "score",
    "generate/score": "score",
    "eval/score": "eval score",
    "val/score": "val score",
    "response_length/mean": "length",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "kl",
    "actor/grad_norm": "grad",
}


def learning(record: Record) -> list[str]:
    """Return losses, rewards and gradient norms, as far as the record has them; null (NaN, Inf) is shown as nan."""
    return [f"{name} {_or_nan(record[key], name)}" for key, name in _LEARNING.items() if key in record]


def learning_columns(records: Sequence[Record]) -> list[list[str]]:
    """Tabulate steps: a row of names, and a row for each step with losses, rewards and gradient norms that any has."""
    shown = {key: name for key, name in _LEARNING.items() if any(key in record for record in records)}
    rows = [
        [f"{record['step']:,}", *(_or_nan(record[key], name) if key in record else "" for key, name in shown.items())]
        for record in records
    ]
    return [["step", *shown.values()], *rows]


def step_line(record: Record) -> str:
    """Return a line for a log: step 12/117 | loss 1.234 | lr 9.8e-06 | grad 0.87 | 12.3k tok/s | ... | ETA 1:02"""
    total = record["total_steps"]
    return " | ".join([f"step {record['step']:>{len(str(total))}}/{total}", *learning(record), *rates(record)])


def _or_nan(value: float | None, name: str) -> str:
    if value is None:
        return "nan"
    return f"{value:.4f}" if name.endswith("loss") else f"{value:.2e}" if name == "lr" else f"{value:.3g}"
