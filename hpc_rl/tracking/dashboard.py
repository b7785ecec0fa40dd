"""One screen of text about a run: progress, curves, nodes, log. Pure functions from a Snapshot to rich renderables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpc_rl.formats.offer import LentNode, by_job
from hpc_rl.formats.usage import NodeUsage, UsageSample
from hpc_rl.liveness.shown_text import shown
from hpc_rl.tracking.formatting import number, rates
from hpc_rl.tracking.history import tone
from hpc_rl.tracking.metrics import Record
from hpc_rl.tracking.timeline import Timeline, cells, rows

BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("train/loss", "loss", "per token"),
    ("val/loss", "validation loss", "per token"),
    ("eval/score", "score", ""),
    ("generate/score", "score so far", ""),
    ("critic/score/mean", "reward", ""),
    ("val/score", "validation reward", ""),
    ("response_length/mean", "response length", "tokens"),
    ("actor/entropy", "entropy", "nats/token"),
    ("actor/ppo_kl", "KL per step", "nats/token"),
    ("train/grad_norm", "gradient norm", ""),
    ("actor/grad_norm", "gradient norm", ""),
    ("train/lr", "learning rate", ""),
    ("actor/lr", "learning rate", ""),
    ("perf/tokens_per_s", "throughput", "tokens/s"),
    ("rollout/lent_share", "by lent engines", "of tokens"),
)
"""(metric, name, unit), the most telling first."""
_FEWEST_CURVES = 2
_LINES_BESIDES = 12
"""Lines of a small screen that curves leave to the other parts."""
_MOST_NODES = 16
_MOST_LENDERS = 4
_LEAST_TIMELINE = 45
"""Columns of a terminal that shows the timeline: the names of phases, a short bar and seconds."""
_FEWEST_LOG_LINES = 4
"""If fewer were left, the timeline of the latest step is not shown."""
_STYLES = {"done": "green", "failed": "red", "": "yellow"}


@dataclass(frozen=True)
class RunSnapshot:
    """The visible state of a run at one moment."""

    name: str
    state: str
    facts: Sequence[str]
    """Job, nodes and attempt, shown beside the state."""
    records: Sequence[Record]
    nodes: Sequence[NodeUsage] = ()
    """Of the newest attempt."""
    log: Sequence[str] = field(default_factory=tuple)
    """The last lines."""
    timeline: Timeline | None = None
    """Of the latest step."""
    phase: str = ""
    """What the run does before its first step."""
    explanation: Sequence[str] = ()
    """Why the run failed; empty for a run that has not."""
    lent_nodes: Sequence[LentNode] = ()
    """Nodes of other jobs, in the newest attempt."""


def screen(now: RunSnapshot, width: int, height: int) -> RenderableType:
    """Lay a snapshot out in so many columns and lines; the log takes the remaining lines."""
    colour = "cyan" if now.state == "RUNNING" else _STYLES[tone(now.state)]
    head = Text.assemble((now.name, "bold"), "  ", (now.state, f"bold {colour}"))
    head.append("  " + " · ".join(now.facts), style="dim")
    head.truncate(width, overflow="ellipsis")
    parts: list[RenderableType] = [head, _progress(now, width)]
    used = 2
    if now.explanation:
        text = Text("\n".join(printable(line) for line in now.explanation), overflow="ellipsis", no_wrap=True)
        parts.append(Panel(text, title="why it failed", title_align="left", border_style="red", padding=(0, 1)))
        used += 2 + len(now.explanation)
    curves = [(name, points, unit) for key, name, unit in CURVES if (points := _values(now.records, key))]
    curves = curves[: max(_FEWEST_CURVES, height - used - _LINES_BESIDES)]
    if curves:
        parts += [Text(), _curves(curves, width)]
        used += 1 + len(curves)
    if now.nodes:
        shown = now.nodes[: max(1, min(_MOST_NODES, height - used - 6))]
        parts += [Text(), _nodes(shown, len(now.nodes) - len(shown), width)]
        used += 2 + len(shown) + (len(shown) < len(now.nodes))
    if lenders := by_job(now.lent_nodes, _MOST_LENDERS):
        text = Text("\n".join(f"lent  {lender}" for lender in lenders), overflow="ellipsis", no_wrap=True)
        parts += [Text(), text]
        used += 1 + len(lenders)
    timeline = now.timeline if width >= _LEAST_TIMELINE else None
    if timeline and timeline.phases and height - used - 5 - len(timeline.phases) >= _FEWEST_LOG_LINES:
        parts += [Text(), _timeline(timeline, width)]
        used += 2 + len(timeline.phases)
    lines = now.log[-max(1, height - used - 3) :]
    if lines:
        text = Text("\n".join(printable(line) for line in lines), no_wrap=True, overflow="ellipsis")
        parts.append(Panel(text, title="log", title_align="left", border_style="dim", padding=(0, 1)))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most so many blocks; each is the mean of an equal share of them."""
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
    """Return what a terminal would show of a line at its end, without control sequences: a log may contain anything."""
    return "".join(c if c.isprintable() else " " for c in shown(text).expandtabs())


def _progress(now: RunSnapshot, width: int) -> RenderableType:
    if not now.records:
        return Text(now.phase or "no step completed", style="yellow")
    last = now.records[-1]
    grid = Table.grid(padding=(0, 2))
    steps = f"step {last['step']:,} of {last['total_steps']:,}"
    pace = " · ".join(rates(last))
    bar_width = max(10, width - len(steps) - len(pace) - 6)
    bar = ProgressBar(total=max(1, last["total_steps"]), completed=last["step"], width=bar_width)
    grid.add_row(steps, bar, Text(pace, style="cyan"))
    return grid


def _curves(curves: Sequence[tuple[str, Sequence[float], str]], width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, values, unit in curves:
        low, high = min(values), max(values)
        span = f"{number(low)} … {number(high)}" if low != high else ""
        grid.add_row(
            Text(name, style="dim"),
            Text(number(values[-1]), style="bold", justify="right"),
            Text(unit, style="dim"),
            Text(sparkline(values, max(10, min(60, width - 64))), style="cyan"),
            Text(span, style="dim"),
        )
    return grid


def _nodes(nodes: Sequence[NodeUsage], hidden: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    gpus = any(node.samples and node.samples[-1].gpus for node in nodes)
    bar = max(6, min(14, (width - 60) // 3))
    columns = ["node", "CPUs, busy cores", "memory, GB", *(["GPUs, busy", "fullest GPU, GB"] if gpus else [])]
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


def _timeline(timeline: Timeline, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    phases = rows(timeline)
    bar = max(10, min(60, width - 13 - max(len(row.name) for row in phases)))
    grid.add_row(Text(f"step {timeline.step:,}", style="dim"), Text(f"0{timeline.length:>{bar - 1}}", style="dim"))
    for row, spans in zip(phases, timeline.phases.values(), strict=True):
        touched = cells(spans, timeline.seconds, bar)
        marks = [("━", "cyan") if is_busy else ("─", "bright_black") for is_busy in touched]
        grid.add_row(Text(row.name, style="dim"), Text.assemble(*marks), Text(f"{row.seconds} s", justify="right"))
    return grid


def _use(node: NodeUsage, last: UsageSample, bar: int) -> list[Text]:
    return [
        _meter(last.cpus, node.cpus, bar, f"{last.cpus:.1f} of {node.cpus}"),
        _meter(last.memory_gb, node.memory_gb, bar, f"{number(last.memory_gb)} of {node.memory_gb:.0f}"),
    ]


def _gpu_cells(last: UsageSample, bar: int) -> list[Text]:
    """Return one block for each GPU's load, and the memory of the fullest GPU."""
    if not last.gpus:
        return []
    busy = [gpu.busy for gpu in last.gpus if gpu.busy is not None]
    blocks = "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in busy)
    mean = f" {100 * sum(busy) / len(busy):.0f} %" if busy else "–"
    fullest = max(last.gpus, key=lambda gpu: gpu.memory_gb / max(1e-9, gpu.total_gb))
    words = f"{fullest.memory_gb:.0f} of {fullest.total_gb:.0f}"
    return [Text.assemble((blocks, "cyan"), mean), _meter(fullest.memory_gb, fullest.total_gb, bar, words)]


def _meter(value: float, full: float, width: int, words: str) -> Text:
    """Draw a bar with its value; red above 95 %."""
    share = min(1.0, value / full) if full > 0 else 0.0
    filled = round(share * width)
    return Text.assemble(
        ("━" * filled, "red" if share > 0.95 else "cyan"), ("─" * (width - filled), "bright_black"), " ", words
    )


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]
