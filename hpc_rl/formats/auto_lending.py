"""The lender jobs that a run queues itself (`hpc-rl lend RUN --auto N`): the order, and what came of it.

The order is a file of the run directory that `hpc-rl lend` writes. While it is there, or jobs of an earlier one wait,
node 0 of the run looks after the lender jobs (`hpc_rl.node.ray_cluster.lender_turns`), and each look records what it
has found. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_rl.formats.typed_json import is_count, is_text, well_typed
from hpc_rl.system.files import read_json, write_atomically

_STATE = ".lend-auto-state.json"


@dataclass
class AutoLending:
    """What the newest look has found and done."""

    most: int = 0
    """Lender jobs that there may be, waiting and running together; 0 without an order."""
    waiting: int = 0
    running: int = 0
    problem: str = ""
    """Why none could be queued or cancelled, on one line; empty if nothing was wrong."""
    lenders: list[str] = field(default_factory=list)
    """Run directories of those that have not ended."""
    step: int = 0
    """The run's newest step."""
    ran: int = 0
    """Lenders that were running when this step was first seen."""
    failures: int = 0
    """How many have failed, one directly after the other."""
    order: int = 0
    """Number of the order that this belongs to."""


_TYPES = {
    **dict.fromkeys(("most", "waiting", "running", "step", "ran", "failures", "order"), is_count),
    "problem": is_text,
    "lenders": lambda value: isinstance(value, list) and all(map(is_text, value)),
}


def order_file(run_dir: Path) -> Path:
    """Return the file of the order, which is private. Without it, a run queues no lenders."""
    return run_dir / ".lend-auto.json"


def needs_looks(run_dir: Path) -> bool:
    """Return whether a run has to look after lender jobs: there is an order, or jobs of an earlier one wait."""
    return order_file(run_dir).exists() or read_auto_lending(run_dir).waiting > 0


def read_auto_lending(run_dir: Path) -> AutoLending:
    """Return what the newest look has found; zeros if there was none."""
    found = well_typed(read_json(run_dir / _STATE), _TYPES)
    most = read_json(order_file(run_dir)).get("most")
    found["most"] = most if is_count(most) else 0
    return AutoLending(**{name: value for name, value in found.items() if name in _TYPES})


def write_auto_lending(run_dir: Path, found: AutoLending) -> None:
    """Record a look."""
    write_atomically(run_dir / _STATE, json.dumps(asdict(found)), forbidden=0o077)
