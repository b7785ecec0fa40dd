"""CHECKS: the table of the checks of `hpc-rl doctor --train`. To add a check, write its function and add a row.

A function on torchrun's ranks has the signature `(bench, world, variant) -> found`, one on the Ray cluster
`(bench, variant) -> found`. It uses the product's own code, returns what it found in words, raises `Failed` if numbers
are wrong and `Skip` if it finds out that it does not apply. Any other error is a failure too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.formats.acceptance import Launcher, Line
from hpc_rl.formats.layouts import Covered
from hpc_rl.probes.acceptance.bench import Layout
from hpc_rl.probes.acceptance.network import BETWEEN, WITHIN
from hpc_rl.probes.acceptance.placements import Placing, parallel_placing, placings

Need = Callable[[Layout, str], str | None]
"""From the layout and the variant to the reason why the check does not apply, or None."""
MODELS = "models"
"""The first check, without which no other one can run."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    function: str
    """Module in this package, and function."""
    launcher: Launcher
    meaning: str
    """What a failure means."""
    setting: str
    """The setting that avoids the problem."""
    variants: Callable[[Layout], Sequence[str]] = lambda _layout: ("",)
    """One line of the report for each."""
    needs: tuple[Need, ...] = ()
    covers: Callable[[Layout, str], Sequence[Covered]] = lambda _layout, _variant: ()
    """From the layout and the variant to the layouts that the check covers, if it applies."""
    after: Callable[[str], str] = lambda _variant: MODELS
    """From the variant to the check that must have passed."""
    deadline_s: float = 180


def modes(_layout: Layout) -> Sequence[str]:
    """Return the values of trainer.sharding, without `auto`, which selects one of the others."""
    found = get_args(TrainingConfig.model_fields["sharding"].annotation)
    return [mode for mode in found if mode != "auto"]


def gpus(layout: Layout, _variant: str) -> str | None:
    return None if layout.uses_gpus else "applies to GPUs only"


def several(layout: Layout, _variant: str) -> str | None:
    return None if layout.size > 1 else "needs 2 processes"


def two_on_a_node(layout: Layout, _variant: str) -> str | None:
    return None if layout.processes > 1 else "needs 2 processes on a node"


def two_nodes(layout: Layout, _variant: str) -> str | None:
    return None if layout.nodes > 1 else "needs 2 nodes"


def for_where(layout: Layout, where: str) -> str | None:
    return two_on_a_node(layout, where) if where == WITHIN else two_nodes(layout, where)


def installed(*packages: str) -> Need:
    """Return the need for packages, by the names with which they are imported."""

    def missing(layout: Layout, _variant: str) -> str | None:
        names = sorted({*packages} - layout.packages)
        return f"not installed: {', '.join(names).replace('_', '-')}" if names else None

    return missing


def engine(layout: Layout, variant: str) -> str | None:
    package = ENGINES[variant].package
    return installed(package)(layout, variant) if package else None


def placing_of(layout: Layout, variant: str) -> Placing:
    """Return the placement with this name."""
    return next(placing for placing in placings(layout) if placing.name == variant)


def engine_of_placing(layout: Layout, variant: str) -> str | None:
    placing = placing_of(layout, variant)
    if placing.engines == ():
        return "needs 2 processes, one for the trainer and one for the engine"
    return engine(layout, placing.engine)


def engines(layout: Layout) -> Sequence[str]:
    """Return the engines that support the device."""
    return list(dict.fromkeys(placing.engine for placing in placings(layout)))


def parallel_variants(_layout: Layout) -> Sequence[str]:
    """Return the sizes of tensor parallelism, each with the place of the engines."""
    return [f"{size}, {where}" for where in (Placing.SAME, Placing.OTHER) for size in (2, 4)]


def parallel_of(layout: Layout, variant: str) -> Placing | None:
    """Return the placement of a variant of tensor parallelism; None if a node is too small."""
    size, where = variant.split(", ")
    return parallel_placing(layout, int(size), where == Placing.SAME)


def enough_for_parallel(layout: Layout, variant: str) -> str | None:
    size, where = variant.split(", ")
    needed = f"a multiple of {size}" if where == Placing.SAME else f"more than {size}"
    return None if parallel_of(layout, variant) else f"needs {needed} processes on a node, not {layout.processes}"


def compiled_of(layout: Layout, variant: str) -> Placing | None:
    """Return the placement of compiled engines: on all devices, at least 2 on a node with tensor parallelism."""
    size = int(variant.removeprefix(TENSOR_PARALLEL))
    return parallel_placing(layout, size, shared=True) if size == 1 or layout.processes >= 2 * size else None


def enough_for_compiled(layout: Layout, variant: str) -> str | None:
    needed = "needs an even number of processes on a node, at least 4"
    return None if compiled_of(layout, variant) else f"{needed}, not {layout.processes}"


def divides_a_node(layout: Layout, variant: str) -> str | None:
    return f"needs a multiple of {variant} processes on a node" if layout.processes % int(variant) else None


def covers_sharding(layout: Layout, mode: str) -> Sequence[Covered]:
    if layout.processes == 1 or mode not in ("full", "hybrid"):
        return ()
    if mode == "full":
        return [Covered.SHARDED]
    return [name for name, least in ((Covered.HYBRID, 2), (Covered.MANY_NODES, 3)) if layout.nodes >= least]


def covers_compiled(layout: Layout, variant: str) -> Sequence[Covered]:
    placing = compiled_of(layout, variant)
    assert placing is not None
    if layout.processes // placing.parallel < 2:
        return ()
    return [Covered.COMPILED_2 if placing.parallel == 1 else Covered.COMPILED_TP2_2]


def covers_parallel(layout: Layout, variant: str) -> Sequence[Covered]:
    placing = parallel_of(layout, variant)
    assert placing is not None
    return placing.covers()


def _after_placing(variant: str) -> str:
    engine_name, where, *_ = variant.split(", ")
    return f"log-probabilities ({engine_name})" if where == Placing.SAME else MODELS


TENSOR_PARALLEL = "tensor parallel "
_RAY, _VLLM = installed("ray", "tensordict"), installed("vllm")
_NUMBERS = "training gives wrong results with this setting"
_REPORT = "report it with this text"

CHECKS: tuple[Case, ...] = (
    Case(
        name=MODELS,
        function="training:make_models",
        launcher="torchrun",
        meaning="a node's own disk cannot hold the test's models, or transformers cannot create them",
        setting="slurm.env.TMPDIR=FOLDER on a local disk with 5 GB of free space",
        after=lambda _variant: "",
        deadline_s=600,
    ),
    Case(
        name="bandwidth",
        function="network:bandwidth",
        launcher="torchrun",
        meaning="the processes cannot exchange tensors over this part of the network",
        setting="slurm.interface; slurm.env.NCCL_IB_DISABLE=1 or slurm.env.NCCL_P2P_DISABLE=1 shows which part fails",
        variants=lambda _layout: (WITHIN, BETWEEN),
        needs=(for_where,),
        after=lambda _variant: "",
    ),
    Case(
        name="attention kernels",
        function="attention:kernels",
        launcher="torchrun",
        meaning="this build of torch computes attention over packed samples wrongly on these devices",
        setting="another version of torch; trainer.device=cpu is correct, but slow",
    ),
    Case(
        name="loss and gradients",
        function="training:loss_and_gradients",
        launcher="torchrun",
        meaning="a training step on these devices differs from float32 on a CPU by more than rounding explains",
        setting="another version of torch or of the driver",
        covers=lambda layout, _: [Covered.ONE_RANK] if layout.size == 1 else (),
    ),
    Case(
        name="packing",
        function="training:packing",
        launcher="torchrun",
        meaning="packed samples and single samples give different results",
        setting="trainer.packing=false for supervised fine-tuning",
    ),
    Case(
        name="recomputation",
        function="training:recomputation",
        launcher="torchrun",
        meaning=_NUMBERS,
        setting="model.enable_gradient_checkpointing=false",
    ),
    Case(
        name="sharding",
        function="training:sharding",
        launcher="torchrun",
        meaning=_NUMBERS,
        setting="trainer.sharding, with a value that passed",
        variants=modes,
        needs=(several,),
        covers=covers_sharding,
    ),
    Case(
        name="sequence parallel",
        function="training:sequence_parallel",
        launcher="torchrun",
        meaning="ranks of a node that compute a row together get wrong results",
        setting="trainer.sequence_parallel=1",
        variants=lambda _layout: ("2", "4"),
        needs=(divides_a_node,),
        covers=lambda _, variant: [Covered.SEQUENCE_2 if variant == "2" else Covered.SEQUENCE_4],
    ),
    Case(
        name="compile",
        function="training:compiled",
        launcher="torchrun",
        meaning="torch.compile fails or gives wrong results",
        setting="model.use_torch_compile=false",
        needs=(gpus,),
        deadline_s=600,
    ),
    Case(
        name="checkpoint and resume",
        function="training:resume",
        launcher="torchrun",
        meaning="a run cannot resume from its checkpoint as if it had not stopped",
        setting="--run-dir on another shared file system",
        covers=lambda layout, _: [Covered.RESUMED] if layout.size > 1 else (),
    ),
    Case(
        name="speed of SFT",
        function="training:speed",
        launcher="torchrun",
        meaning="a supervised training step fails on a model of 0.6 billion parameters",
        setting="a lower trainer.micro_tokens",
        deadline_s=600,
    ),
    # It comes after the speed: Liger also replaces functions of models that are loaded later.
    Case(
        name="liger",
        function="training:liger",
        launcher="torchrun",
        meaning="the kernels of Liger fail or give wrong results",
        setting="model.use_liger=false",
        needs=(gpus, installed("liger_kernel")),
    ),
    Case(
        name="log-probabilities",
        function="generation:log_probabilities",
        launcher="ray",
        meaning="the rollout engine and the trainer compute different probabilities from the same weights",
        setting="algorithm.tis_cap=2, rollout.dtype=float32, or another rollout.name",
        variants=engines,
        needs=(_RAY, engine),
        deadline_s=900,
    ),
    Case(
        name="weight transfer",
        function="generation:weight_transfer",
        launcher="ray",
        meaning="the rollout engine does not receive the weights of the trainer",
        setting="pools.spec and rollout.name, with a placement that passed",
        variants=lambda layout: [placing.name for placing in placings(layout)],
        needs=(_RAY, engine_of_placing),
        covers=lambda layout, variant: placing_of(layout, variant).covers(),
        after=_after_placing,
        deadline_s=900,
    ),
    Case(
        name="sleep and wake",
        function="generation:sleep_and_wake",
        launcher="ray",
        meaning="vllm does not release its GPU memory while the trainer uses it",
        setting="pools.spec, with separate GPUs for the engine",
        needs=(gpus, _RAY, _VLLM),
        after=lambda _variant: "log-probabilities (vllm)",
        deadline_s=900,
    ),
    Case(
        name="tensor parallel",
        function="generation:tensor_parallel",
        launcher="ray",
        meaning="vllm cannot split a model over several GPUs, or a split model has other probabilities",
        setting="rollout.tensor_parallel_size=1; slurm.env.NCCL_P2P_DISABLE=1 if vllm stops at its start",
        variants=parallel_variants,
        needs=(_RAY, _VLLM, enough_for_parallel),
        covers=covers_parallel,
        deadline_s=900,
    ),
    Case(
        name="compiled engines",
        function="generation:compiled",
        launcher="ray",
        meaning="vllm cannot compile the model, or what it has compiled does not run on the GPUs of another engine",
        setting="rollout.engine_kwargs.enforce_eager=true",
        variants=lambda _layout: [f"{TENSOR_PARALLEL}{size}" for size in (1, 2)],
        needs=(gpus, _RAY, _VLLM, enough_for_compiled),
        covers=covers_compiled,
        after=lambda _variant: "log-probabilities (vllm)",
        deadline_s=1800,
    ),
    Case(
        name="speed of PPO",
        function="generation:speed",
        launcher="ray",
        meaning="a step of reinforcement learning fails on a model of 0.6 billion parameters",
        setting="a lower trainer.micro_tokens, or pools.spec with separate GPUs for the engine",
        needs=(_RAY,),
        deadline_s=900,
    ),
)


@dataclass(frozen=True)
class CheckRow:
    """A row of the table for one variant."""

    case: Case
    variant: str
    reason: str | None
    """Why it does not apply to the layout; None if it does."""
    covers: Sequence[Covered] = ()
    """The layouts that it covers."""

    @property
    def name(self) -> str:
        return f"{self.case.name} ({self.variant})" if self.variant else self.case.name

    @property
    def after(self) -> str:
        """Name of the check that must have passed, or an empty text."""
        return self.case.after(self.variant)

    def line(self) -> Line:
        """Return the line that plans it; a check that does not apply is skipped at once."""
        case = self.case
        planned = Line(self.name, case.launcher, "planned", case.meaning, case.setting, deadline_s=case.deadline_s)
        if self.reason is not None:
            return planned.ended("skipped", self.reason)
        return replace(planned, covers=tuple(map(str, self.covers)))


def rows(layout: Layout, checks: Sequence[Case] = CHECKS) -> list[CheckRow]:
    """Return the rows of a layout, in the order in which they run."""
    found = []
    for case in checks:
        for variant in case.variants(layout):
            reason = next((reason for need in case.needs if (reason := need(layout, variant))), None)
            found.append(CheckRow(case, variant, reason, () if reason else case.covers(layout, variant)))
    return found
