"""A run as one screen of text: progress, curves, nodes, end of the log. Pure: from a Snapshot to rich's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpc_rl.host.usage import NodeUsage, UsageSample
from hpc_rl.tracking.formatting import number, rates
from hpc_rl.tracking.metrics import Record

BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("train/loss", "loss"),
    ("val/loss", "validation loss"),
    ("critic/score/mean", "reward"),
    ("val/score", "validation reward"),
    ("response_length/mean", "response length"),
    ("actor/entropy", "entropy"),
    ("actor/ppo_kl", "KL of a step"),
    ("perf/tokens_per_s", "tokens/s"),
)
_MOST_NODES = 16
_STYLES = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "STOPPED": "yellow", "REQUEUED": "yellow"}


@dataclass(frozen=True)
class Snapshot:
    """What there is to see of a run at one moment."""

    name: str
    state: str
    facts: Sequence[str]
    """Job, nodes, attempt, ...: shown beside the state."""
    records: Sequence[Record]
    nodes: Sequence[NodeUsage] = ()
    """Of the newest attempt."""
    log: Sequence[str] = field(default_factory=tuple)
    """Its last lines."""


def screen(now: Snapshot, width: int, height: int) -> RenderableType:
    """All of it, in so many columns and lines; the log gets what is left."""
    head = Text.assemble((now.name, "bold"), "  ", (now.state, f"bold {_STYLES.get(now.state, 'red')}"))
    head.append("  " + " · ".join(now.facts), style="dim")
    head.truncate(width, overflow="ellipsis")
    parts: list[RenderableType] = [head, _progress(now.records, width)]
    used = 2
    curves = [(name, points) for key, name in CURVES if (points := _values(now.records, key))]
    if curves:
        parts += [Text(), _curves(curves, width)]
        used += 1 + len(curves)
    if now.nodes:
        shown = now.nodes[: max(1, min(_MOST_NODES, height - used - 6))]
        parts += [Text(), _nodes(shown, len(now.nodes) - len(shown), width)]
        used += 2 + len(shown) + (len(shown) < len(now.nodes))
    lines = now.log[-max(1, height - used - 3) :]
    if lines:
        text = Text("\n".join(printable(line) for line in lines), no_wrap=True, overflow="ellipsis")
        parts.append(Panel(text, title="log", title_align="left", border_style="dim", padding=(0, 1)))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of values in at most so many blocks; each is the mean of an equal run of them."""
    count = min(width, len(values))
    if count == 0:
        return ""
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def printable(text: str) -> str:
    """The last of what a line shows, without control sequences: a log may hold anything."""
    plain = Text.from_ansi(text.rpartition("\r")[2] or text.strip("\r")).plain
    return "".join(c if c.isprintable() else " " for c in plain.expandtabs())


def _progress(records: Sequence[Record], width: int) -> RenderableType:
    if not records:
        return Text("waiting for the first step", style="yellow")
    last = records[-1]
    grid = Table.grid(padding=(0, 2))
    steps = f"step {last['step']:,} of {last['total_steps']:,}"
    pace = " · ".join(rates(last))
    bar_width = max(10, width - len(steps) - len(pace) - 6)
    bar = ProgressBar(total=max(1, last["total_steps"]), completed=last["step"], width=bar_width)
    grid.add_row(steps, bar, Text(pace, style="cyan"))
    return grid


def _curves(curves: Sequence[tuple[str, Sequence[float]]], width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, values in curves:
        low, high = min(values), max(values)
        span = f"{number(low)} … {number(high)}" if low != high else ""
        grid.add_row(
            Text(name, style="dim"),
            Text(number(values[-1]), style="bold", justify="right"),
            Text(sparkline(values, max(10, min(60, width - 52))), style="cyan"),
            Text(span, style="dim"),
        )
    return grid


def _nodes(nodes: Sequence[NodeUsage], hidden: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    gpus = any(node.samples and node.samples[-1].gpus for node in nodes)
    bar = max(6, min(14, (width - 60) // 3))
    columns = ["node", "CPUs", "memory, GB", *(["GPUs busy", "fullest GPU, GB"] if gpus else [])]
    for name in columns:
        table.add_column(name, no_wrap=True)
    for node in nodes:
        last = node.samples[-1] if node.samples else None
        name = f"{node.rank}: {node.node}"
        cells = [Text(name)] if last is None else [Text(name), *_use(node, last, bar), *_gpu_cells(last, bar)]
        table.add_row(*cells)
    if hidden:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    return table


def _use(node: NodeUsage, last: UsageSample, bar: int) -> list[Text]:
    return [
        _meter(last.cpus, node.cpus, bar, f"{last.cpus:.1f} of {node.cpus}"),
        _meter(last.memory_gb, node.memory_gb, bar, f"{number(last.memory_gb)} of {node.memory_gb:.0f}"),
    ]


def _gpu_cells(last: UsageSample, bar: int) -> list[Text]:
    """One block for each GPU's work, and the memory of the fullest."""
    if not last.gpus:
        return []
    busy = [gpu.busy for gpu in last.gpus if gpu.busy is not None]
    blocks = "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in busy)
    mean = f" {100 * sum(busy) / len(busy):.0f} %" if busy else "–"
    fullest = max(last.gpus, key=lambda gpu: gpu.memory_gb / max(1e-9, gpu.total_gb))
    words = f"{fullest.memory_gb:.0f} of {fullest.total_gb:.0f}"
    return [Text.assemble((blocks, "cyan"), mean), _meter(fullest.memory_gb, fullest.total_gb, bar, words)]


def _meter(value: float, full: float, width: int, words: str) -> Text:
    """A bar and what it says; red where there is hardly any left."""
    share = min(1.0, value / full) if full > 0 else 0.0
    filled = round(share * width)
    return Text.assemble(
        ("━" * filled, "red" if share > 0.95 else "cyan"), ("─" * (width - filled), "bright_black"), " ", words
    )


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]
