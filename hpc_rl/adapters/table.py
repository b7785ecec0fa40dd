"""ADAPTERS: the table of other people's programs. To add one, add a file and a row.

Submission chooses the row (`slurm.adapter`) and writes its name into the job script; the node entries use it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpc_rl.adapters.adapter import Adapter
from hpc_rl.adapters.loops import ACCELERATE, LIGHTNING, TORCHTITAN
from hpc_rl.adapters.nemo_rl import NEMO_RL
from hpc_rl.adapters.openrlhf import OPENRLHF, OPENRLHF_TRAINERS
from hpc_rl.adapters.prefixes import plain
from hpc_rl.adapters.prime_rl import PRIME_RL
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.skyrl import SKYRL
from hpc_rl.adapters.trainer import AXOLOTL, LLAMA_FACTORY, MS_SWIFT, TRANSFORMERS, TRL
from hpc_rl.adapters.verl import VERL, VERL_SFT
from hpc_rl.errors import UserError

AUTO, NONE = "auto", "none"
GENERIC = Adapter(name="generic", title="your program", kinds=("torchrun", "ray"))
"""A program that looks for the stop file itself, saves, and exits with code 75."""
ADAPTERS: Mapping[str, Adapter] = {
    row.name: row
    for row in (
        AXOLOTL,
        LLAMA_FACTORY,
        MS_SWIFT,
        TRL,
        TRANSFORMERS,
        LIGHTNING,
        TORCHTITAN,
        VERL,
        VERL_SFT,
        OPENRLHF,
        OPENRLHF_TRAINERS,
        NEMO_RL,
        SKYRL,
        PRIME_RL,
        ACCELERATE,
        GENERIC,
    )
}
"""In the order in which they are asked: what is built on another program comes before it."""


def choose(setting: str, kind: str, program: Program) -> Adapter:
    """Return the adapter of a program.

    Args:
        setting: slurm.adapter.
        kind: the kind of the job.

    Raises:
        UserError: there is no such adapter, or it is for the other kind of job.
    """
    if setting == NONE or not program.words:
        return GENERIC
    if setting == AUTO:
        rows = (row for row in ADAPTERS.values() if kind in row.kinds)
        return next((row for row in rows if row.recognises(plain(program))), GENERIC)
    row = ADAPTERS.get(setting)
    if row is None:
        raise UserError(
            f"slurm.adapter={setting}: there is no such adapter: choose {AUTO}, {NONE}, {', '.join(ADAPTERS)}"
        )
    if kind not in row.kinds:
        raise UserError(f"slurm.adapter={setting}: {row.title} needs `submit {row.kinds[0]}`, not `submit {kind}`")
    return row


def started(adapter: Adapter, program: Program) -> tuple[str, ...]:
    """Return what the ranks or the driver run for a program as it was typed."""
    return program.words if adapter is GENERIC else tuple(adapter.command(plain(program)))


def description(adapter: Adapter, program: Program) -> str:
    """Return what an adapter will do, in a sentence."""
    if adapter is GENERIC:
        others = (row for row in ADAPTERS.values() if row.recognises(program))
        other = next((f"; {row.title} needs `submit {row.kinds[0]}`" for row in others), "")
        return f"no adapter: this program saves and resumes only if it looks for $HPC_RL_RUN_DIR/stop itself{other}"
    to = f" to {found}" if (found := adapter.output(program)) else ""
    return f"{adapter.title}: saves{to} {adapter.saves}"
