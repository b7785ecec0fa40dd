"""Which plots a report has: those of one run, or of several runs in the same axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from hpc_rl.formats.usage import NodeUsage, UsageSample
from hpc_rl.tracking.page.plot import Plot, Point, Series
from hpc_rl.tracking.recorded import RecordedRun
from hpc_rl.tracking.timeline import OTHER_COLOUR, named

_MOST_PHASES = 7
"""Shorter phases are summed up: more colours than that cannot be told apart."""
_MOST_NODES = 6
"""More nodes than that are shown as the highest, the mean and the lowest of them."""
_MOST_KEYS = 8
"""A plot with more lines has no legend; the table of runs shows their colours."""


@dataclass(frozen=True)
class Key:
    """An entry of a plot's legend."""

    style: int
    name: str
    index: int
    """Which of the plot's series."""


@dataclass(frozen=True)
class Figure:
    """A plot with its title."""

    title: str
    unit: str
    plot: Plot

    @property
    def keys(self) -> list[Key]:
        """The legend; empty if the plot has too many lines for one."""
        series = self.plot.series
        found = [Key(style, one.name, i) for i, (one, style) in enumerate(zip(series, self.plot.styles(), strict=True))]
        return found if len(found) <= _MOST_KEYS else []


@dataclass(frozen=True)
class PlotGroup:
    """Figures below a common heading."""

    title: str
    figures: list[Figure]


@dataclass(frozen=True)
class Chart:
    """A plot of metrics against the step."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """(key in metrics.jsonl, its name in this plot)."""
    from_zero: bool = False


LEARNING = (
    Chart("Loss", "mean of a step", (("train/loss", "training"), ("val/loss", "validation"))),
    Chart(
        "Divergence",
        "from the teacher, nats per token",
        (("train/divergence", "training"), ("val/divergence", "validation")),
        True,
    ),
    Chart(
        "Cross-entropy",
        "of the data, nats per token",
        (("train/cross_entropy", "training"), ("val/cross_entropy", "validation")),
    ),
    Chart(
        "Agreement",
        "on the most probable token, fraction of tokens",
        (("train/agreement", "training"), ("val/agreement", "validation")),
    ),
    Chart("Accuracy", "of preferences", (("train/accuracy", "training"), ("val/accuracy", "validation"))),
    Chart("Margin", "reward of chosen minus rejected", (("train/margin", "training"), ("val/margin", "validation"))),
    Chart("Rewards", "mean, training", (("train/reward_chosen", "chosen"), ("train/reward_rejected", "rejected"))),
    Chart(
        "Log-probability",
        "sum over a response, training",
        (("train/logp_chosen", "chosen"), ("train/logp_rejected", "rejected")),
    ),
    Chart(
        "Calibration error",
        "of the probability of an order",
        (("train/calibration_error", "training"), ("val/calibration_error", "validation")),
        True,
    ),
    Chart(
        "Absolute error",
        "of the score",
        (("train/absolute_error", "training"), ("val/absolute_error", "validation")),
        True,
    ),
    Chart("Reward", "mean score of responses", (("critic/score/mean", "training"), ("val/score", "validation"))),
    Chart("Score", "mean of the responses so far", (("generate/score", "score"),)),
    Chart("Score of checkpoints", "mean of the data sets", (("eval/score", "score"),)),
    Chart(
        "Response length",
        "mean, tokens",
        (("response_length/mean", "training"), ("val/response_length", "validation")),
        True,
    ),
    Chart(
        "Conversations",
        "mean per conversation",
        (("environment/turns/mean", "turns"), ("environment/tool_calls", "tool calls")),
        True,
    ),
    Chart("Entropy", "nats per token", (("actor/entropy", "policy"),), True),
    Chart("KL to the reference", "per token, in the loss", (("actor/kl_loss", "policy"),)),
    Chart("KL to the reference", "per response, in the reward", (("actor/reward_kl_penalty", "policy"),)),
    Chart("KL to the teacher", "per token, on-policy", (("actor/teacher_kl", "policy"),)),
    Chart("KL per step", "old to new policy, per token", (("actor/ppo_kl", "policy"),)),
)
UPDATES = (
    Chart("Policy loss", "", (("actor/pg_loss", "policy"),)),
    Chart("Critic loss", "", (("critic/vf_loss", "critic"),), True),
    Chart("Critic", "explained variance", (("critic/vf_explained_var", "critic"),)),
    Chart("Clipped", "fraction of tokens", (("actor/pg_clipfrac", "policy"), ("critic/vf_clipfrac", "critic")), True),
    Chart(
        "Truncated",
        "fraction of responses at the maximum length",
        (("response_length/clip_ratio", "training"), ("val/unfinished", "validation")),
        True,
    ),
    Chart(
        "Gradient norm",
        "before clipping",
        (("train/grad_norm", "model"), ("actor/grad_norm", "policy"), ("critic/grad_norm", "critic")),
        True,
    ),
    Chart("Learning rate", "", (("train/lr", "model"), ("actor/lr", "policy"), ("critic/lr", "critic")), True),
    Chart(
        "Engine and trainer",
        "difference of probabilities",
        (("training/rollout_probs_diff_mean", "mean"), ("training/rollout_probs_diff_max", "largest")),
        True,
    ),
    Chart(
        "Weights of the correction",
        "fraction of tokens",
        (
            ("training/is_weight/capped", "over the cap"),
            ("training/is_weight/rejected", "left out"),
            ("training/is_weight/ess", "effective sample size"),
        ),
        True,
    ),
    Chart(
        "Staleness",
        "weight updates since a token was sampled",
        (("rollout/staleness/mean", "mean"), ("rollout/staleness/max", "largest")),
        True,
    ),
)
SPEED = (
    Chart("Throughput", "tokens/s", (("perf/tokens_per_s", "all ranks"),), True),
    Chart("Idle engines", "seconds per step", (("perf/engine_idle_s", "engine"),), True),
    Chart("Lent engines", "that generated", (("rollout/lent_engines", "engines"),), True),
    Chart("Tokens of lent engines", "fraction of all", (("rollout/lent_share", "tokens"),), True),
    Chart("MFU", "fraction of the GPUs' peak", (("perf/mfu", "training"), ("perf/mfu/actor", "policy updates")), True),
    Chart("Peak memory", "GB per process", (("perf/max_memory_gb", "process"),), True),
)


def plots_of_run(run: RecordedRun) -> list[PlotGroup]:
    """Return all plots of one run for which there is data."""
    marks = restarts(run)
    speed = _figures(run, SPEED, marks)
    if phases := phase_series(run):
        speed.insert(1, Figure("Time per step", "seconds", Plot(phases, from_zero=True, stacked=True)))
    learning, updates = _figures(run, LEARNING, marks), _figures(run, UPDATES, marks)
    if len(learning) <= 1:  # a heading for one plot would be a row for one plot
        learning, updates = learning + updates, []
    groups = [
        PlotGroup("Learning", learning),
        PlotGroup("Updates", updates),
        PlotGroup("Speed and memory", speed),
        PlotGroup("Nodes", node_figures(run.usage)),
    ]
    return [group for group in groups if group.figures]


def plots_of_runs(runs: Sequence[RecordedRun]) -> list[PlotGroup]:
    """Return one plot per metric with one line per run."""
    groups = []
    for title, charts in (("Learning", LEARNING), ("Updates", UPDATES), ("Speed and memory", SPEED)):
        figures = []
        for chart in charts:
            for key, name in chart.metrics:
                lines = [Series(run.name, _points(run, key), style) for style, run in enumerate(runs)]
                lines = [line for line in lines if line.points]
                if lines:
                    full = chart.title if len(chart.metrics) == 1 else f"{chart.title}, {name}"
                    figures.append(Figure(full, chart.unit, Plot(lines, from_zero=chart.from_zero)))
        groups.append(PlotGroup(title, figures))
    return [group for group in groups if group.figures]


def phase_medians(runs: Sequence[RecordedRun]) -> list[tuple[str, list[float | None]]]:
    """Return (phase, median seconds of a step in each run), the longest phase first and the whole step last."""
    keys = {key for run in runs for record in run.records for key in record if key.startswith("timing_s/")}
    rows = []
    for phase, (name, _) in named({key.removeprefix("timing_s/") for key in keys}).items():
        values = [[value for _, value in run.points(f"timing_s/{phase}")] for run in runs]
        rows.append((name, [median(found) if found else None for found in values]))
    rows.sort(key=lambda row: (row[0] == "step", -max(value or 0.0 for value in row[1]), row[0]))
    return rows


def restarts(run: RecordedRun) -> list[float]:
    """Return the steps after which a new attempt resumed."""
    began = [attempt.began for attempt in run.history.attempts[1:] if attempt.began is not None]
    steps = []
    for time in began:
        before = [record["step"] for record in run.records if record.get("time", 0) < time]
        if before and before[-1] < run.records[-1]["step"]:
            steps.append(float(before[-1]))
    return steps


def phase_series(run: RecordedRun) -> list[Series]:
    """Return timing_s/<phase> of every step as series that add up, the longest phase first.

    What timing_s/step has beyond the phases is called "other".
    """
    timed = [record for record in run.records if any(key.startswith("timing_s/") for key in record)]
    keys = {key for record in timed for key in record if key.startswith("timing_s/")} - {"timing_s/step"}
    totals = {key: sum(record.get(key) or 0.0 for record in timed) for key in keys}
    shown = sorted(keys, key=lambda key: (-totals[key], key))[:_MOST_PHASES]
    known = named({key.removeprefix("timing_s/") for key in keys})
    series = [
        Series(name, [(r["step"], r.get(key) or 0.0) for r in timed], colour)
        for key, (name, colour) in ((key, known[key.removeprefix("timing_s/")]) for key in shown)
    ]
    rest = [
        (r["step"], max(0.0, (r.get("timing_s/step") or 0.0) - sum(r.get(key) or 0.0 for key in shown))) for r in timed
    ]
    if sum(value for _, value in rest) > 0.01 * sum(totals.values()):
        series.append(Series("other" if shown else "step", rest, OTHER_COLOUR))
    return series


def node_figures(usage: Sequence[Sequence[NodeUsage]]) -> list[Figure]:
    """Plot what each node used against the time that the run was running; gaps between attempts are left out."""
    measures: list[tuple[str, str, Callable[[UsageSample], float | None]]] = [
        ("Memory per node", "GB", lambda sample: sample.memory_gb),
        ("CPUs per node", "busy cores", lambda sample: sample.cpus),
        ("GPUs per node", "mean % busy", _gpus_busy),
        ("GPU memory per node", "GB, fullest GPU", lambda s: max((gpu.memory_gb for gpu in s.gpus), default=None)),
    ]
    total = sum(_seconds(nodes) for nodes in usage)
    size, unit = next(
        (size, unit)
        for size, unit in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
        if total >= 2 * size or size == 1
    )
    figures = []
    for title, what, measure in measures:
        series = _few(_by_node(usage, measure, size))
        if series:
            figures.append(Figure(title, what, Plot(series, x=unit, from_zero=True)))
    return figures


def _by_node(
    usage: Sequence[Sequence[NodeUsage]], measure: Callable[[UsageSample], float | None], size: float
) -> list[Series]:
    points: dict[int, list[Point]] = {}
    names: dict[int, str] = {}
    before = 0.0
    for nodes in usage:
        began = min((node.began for node in nodes), default=0.0)
        for node in nodes:
            names[node.rank] = f"{node.rank}: {node.node}"
            values = [(sample.time - began, measure(sample)) for sample in node.samples]
            points.setdefault(node.rank, []).extend(
                ((before + at) / size, value) for at, value in values if value is not None
            )
        before += _seconds(nodes)
    return [Series(names[rank], points[rank]) for rank in sorted(points) if points[rank]]


def _few(series: list[Series]) -> list[Series]:
    """Summarize many nodes by their extremes; nodes sample at about the same times."""
    if len(series) <= _MOST_NODES:
        return series
    rows = list(zip(*(line.points for line in series), strict=False))
    summaries: list[tuple[str, Callable[[list[float]], float]]] = [
        ("highest node", max),
        (f"mean of {len(series)} nodes", lambda values: sum(values) / len(values)),
        ("lowest node", min),
    ]
    return [Series(name, [(row[0][0], of([value for _, value in row])) for row in rows]) for name, of in summaries]


def _figures(run: RecordedRun, charts: Sequence[Chart], marks: Sequence[float]) -> list[Figure]:
    figures = []
    for chart in charts:
        lines = [Series(name, _points(run, key), 1 if name == "validation" else None) for key, name in chart.metrics]
        lines = [line for line in lines if line.points]
        if lines:
            figures.append(Figure(chart.title, chart.unit, Plot(lines, from_zero=chart.from_zero, marks=marks)))
    return figures


def _points(run: RecordedRun, key: str) -> list[Point]:
    """Return (step, value) of a metric; nothing for the score of an evaluation of one model, which has a table."""
    return [] if key == "eval/score" and run.evaluation else run.points(key)


def _seconds(nodes: Sequence[NodeUsage]) -> float:
    return max((node.ended for node in nodes), default=0.0) - min((node.began for node in nodes), default=0.0)


def _gpus_busy(sample: UsageSample) -> float | None:
    busy = [gpu.busy for gpu in sample.gpus if gpu.busy is not None]
    return 100 * sum(busy) / len(busy) if busy else None
