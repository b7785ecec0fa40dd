"""The offer of a run to jobs that lend it nodes: where its Ray is, and what a node has to have. Standard library only.

The run's driver writes the file; `hpc_rl.node.ray_cluster.lender` reads it. The token is in another file beside it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpc_rl.formats.counted import counted
from hpc_rl.formats.typed_json import Check, is_count, is_job_id, is_number, is_text, is_time, well_typed
from hpc_rl.system.files import read_json, write_atomically

LENT = "lent"
"""Ray's resource that only nodes have that are lent for engines: one for each GPU, or for each CPU slot."""
LENT_ENVIRONMENTS = "lent_environments"
"""Ray's resource that only nodes have that are lent for environments: one."""
LEAVING = "HPC_RL_LEAVING"
"""Environment variable of engines on a lent node: a file that exists as soon as the node is about to leave."""
_FILE = "offer.json"
_REFUSED = "refused-"
_LENDERS, _ENVIRONMENTS = "lenders.json", "lent-environments.json"
_TYPES: Mapping[str, Check] = {
    **dict.fromkeys(("engines", "tokens", "places"), is_count),
    "job": is_job_id,
    "node": is_text,
    "share": is_number,
    "joined": is_time,
    "left": lambda value: value is None or is_time(value),
}
_ENVIRONMENT_TYPES: Mapping[str, Check] = {
    **dict.fromkeys(("processes", "conversations"), is_count),
    "job": is_job_id,
    "node": is_text,
}
_PACKAGES = ("hpc-rl", "ray", "torch", "transformers")


@dataclass(frozen=True)
class Offer:
    """What a run tells to lenders."""

    gcs_address: str
    """`host:port` of Ray's global control store."""
    model: str
    """Path or name of the model that engines load."""
    versions: Mapping[str, str]
    """Packages that both sides have to have alike, and Python's."""
    continues: bool = False
    """Whether other engines continue the responses of one that leaves (rollout.partial)."""
    token: str = ""
    """SHA-256 of the token. Ray takes minutes to end on a node that has another one."""

    def write(self, attempt_dir: Path) -> None:
        """Write the offer into the folder of an attempt, which is private."""
        write_atomically(attempt_dir / _FILE, json.dumps(asdict(self)), forbidden=0o077)

    def other_versions(self, own: Mapping[str, str]) -> list[str]:
        """Return `ray: 2.60.0 here, 2.59.0 in the run` for each difference of a node, which has `own`."""
        return [
            f"{name}: {f'{own[name]} here' if name in own else 'missing here'}, {wanted} in the run"
            for name, wanted in self.versions.items()
            if own.get(name) != wanted
        ]


def read_offer(attempt_dir: Path) -> Offer | None:
    """Return the offer of an attempt; None if there is none."""
    record = read_json(attempt_dir / _FILE)
    address, model, versions, token = (record.get(name) for name in ("gcs_address", "model", "versions", "token"))
    if not (isinstance(address, str) and isinstance(model, str) and isinstance(versions, dict)):
        return None
    wanted = {str(name): str(value) for name, value in versions.items()}
    return Offer(address, model, wanted, record.get("continues") is True, token if isinstance(token, str) else "")


@dataclass
class LentNode:
    """A node that another job lends, or has lent, to an attempt of a run."""

    job: str
    """Slurm's id of the job."""
    node: str
    engines: int = 0
    """Those that are there now."""
    tokens: int = 0
    """Tokens that its engines have generated."""
    share: float = 0.0
    """Part of all tokens that were generated in the attempt."""
    places: int = 0
    """Engines for which it has room."""
    joined: float = 0.0
    """Unix seconds."""
    left: float | None = None
    """Unix seconds; None if it is there, or was there when the attempt ended."""

    def hours(self, now: float) -> float:
        """Return for how long the node has been there.

        Args:
            now: in Unix seconds, or the end of the attempt.
        """
        return max(0.0, (now if self.left is None else self.left) - self.joined) / 3600

    @property
    def name(self) -> str:
        """The node and its job, in words."""
        return f"{self.node} (job {self.job})" if self.job else self.node

    def __str__(self) -> str:
        engines = counted(self.engines, "engine") if self.engines else "no engine now"
        return f"{self.name}: {engines}, {self.tokens:,} tokens, {self.share:.0%}"


def by_job(nodes: Iterable[LentNode], most: int) -> list[LentNode]:
    """Return an entry for each job that lends nodes, or has lent them, the one with the most tokens first.

    Args:
        most: jobs with entries of their own. The last entry is the sum of the others, without a job.
    """
    jobs: dict[str, list[LentNode]] = {}
    for node in nodes:
        jobs.setdefault(node.job, []).append(node)
    entries = []
    for job, found in jobs.items():
        names = {node.node for node in found}
        entries.append(_sum(job, names.pop() if len(names) == 1 else f"{len(names)} nodes", found))
    entries.sort(key=lambda entry: -entry.tokens)
    rest = entries[most:]
    return entries[:most] + ([_sum("", counted(len(rest), "other job"), rest)] if rest else [])


def _sum(job: str, node: str, found: Sequence[LentNode]) -> LentNode:
    times = [each.left for each in found if each.left is not None]
    return LentNode(
        job,
        node,
        engines=sum(each.engines for each in found),
        tokens=sum(each.tokens for each in found),
        share=sum(each.share for each in found),
        places=sum({(each.job, each.node): each.places for each in found}.values()),  # a node may have come again
        joined=min(each.joined for each in found),
        left=max(times) if len(times) == len(found) else None,
    )


@dataclass
class LentEnvironments:
    """A node that another job lends, or has lent, to an attempt of a run for its environments."""

    job: str
    """Slurm's id of the job."""
    node: str
    processes: int = 0
    """Processes of environments that are there now."""
    conversations: int = 0
    """Conversations that were started there."""


def is_lent(resources: Mapping[str, float]) -> bool:
    """Return whether a node with these resources of Ray belongs to another job."""
    return not resources.keys().isdisjoint((LENT, LENT_ENVIRONMENTS))


def refusal_file(attempt_dir: Path, name: str) -> Path:
    """Return the file in which a run tells a lent node why it takes no engines of it any more.

    Args:
        name: the node's name in Ray.
    """
    return attempt_dir / f"{_REFUSED}{name}"


def write_lent_nodes(attempt_dir: Path, lenders: Sequence[LentNode]) -> None:
    """Record the lenders of an attempt."""
    _write(attempt_dir / _LENDERS, lenders)


def write_lent_environments(attempt_dir: Path, lenders: Sequence[LentEnvironments]) -> None:
    """Record the lenders of an attempt that are for its environments."""
    _write(attempt_dir / _ENVIRONMENTS, lenders)


def read_lent_nodes(attempt_dir: Path) -> list[LentNode]:
    """Return the lenders of an attempt. Damaged entries are left out."""
    return [LentNode(**entry) for entry in _read(attempt_dir / _LENDERS, _TYPES)]


def read_lent_environments(attempt_dir: Path) -> list[LentEnvironments]:
    """Return the lenders of an attempt that are for its environments. Damaged entries are left out."""
    return [LentEnvironments(**entry) for entry in _read(attempt_dir / _ENVIRONMENTS, _ENVIRONMENT_TYPES)]


def _write(path: Path, lenders: Sequence[LentNode | LentEnvironments]) -> None:
    write_atomically(path, json.dumps({"lenders": [asdict(lender) for lender in lenders]}))


def _read(path: Path, types: Mapping[str, Check]) -> list[dict[str, Any]]:
    entries = read_json(path).get("lenders", [])
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    typed = [{name: entry.get(name) for name in types} for entry in found]
    return [entry for entry in typed if well_typed(entry, types) == entry]


def versions_of(package: str | None) -> dict[str, str]:
    """Return the versions that engines depend on.

    Args:
        package: the engine's own, if it has one.
    """
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in (*_PACKAGES, *([package] if package else [])):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
