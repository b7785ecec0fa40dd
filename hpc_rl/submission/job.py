"""One job before it is queued: everything that its script depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter
from hpc_rl.adapters.prefixes import plain
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.table import choose
from hpc_rl.config.compose import dump
from hpc_rl.config.job import JobConfig
from hpc_rl.config.kinds import KINDS, JobKind
from hpc_rl.config.tree import MOST_OWN_BYTES
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm.commands import NodeListing
from hpc_rl.submission.series.after import After, is_coming


@dataclass(frozen=True)
class Job:
    """A job that can be checked, rendered and queued."""

    kind: str
    """Name of a row of KINDS."""
    config: JobConfig
    run_dir: RunDir
    working_dir: Path
    """Folder that relative paths refer to, also on the nodes."""
    program: tuple[str, ...] = ()
    """The user's own program and its arguments, if the kind takes one, without its launcher."""
    after: After | None = None
    """Jobs that have to complete first. They are options on sbatch's command line, so that the script can be reused."""
    command: tuple[str, ...] = ()
    """The command that requested the job, for job.json."""
    is_named: bool = True
    """Whether the user chose the run directory. Otherwise its name is the first free one, until it is reserved."""
    nodes: NodeListing = field(default_factory=NodeListing, compare=False)
    """The nodes of the cluster, which planning and checking share."""
    facts: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Further entries of job.json."""
    note: str = ""
    """A sentence about what was chosen for the user when the job was planned."""
    typed: tuple[str, ...] = ()
    """The words of the program as they were typed; empty if they are not known."""

    @property
    def coming(self) -> frozenset[Path]:
        """What the jobs before this one will have written, and the folders that only the nodes have."""
        return (self.after.coming if self.after else frozenset()) | frozenset(map(Path, self.config.slurm.node_folders))

    def expects(self, *names: str | Path | None) -> bool:
        """Return whether one of these paths (PATH or PATH:NAME) exists only when the job runs."""
        return any(is_coming(str(name).partition(":")[0], self.coming) for name in names if name)

    @property
    def data_state(self) -> dict[str, list[int]]:
        """Size and time of change (nanoseconds) of each data file, below the folder that the job runs in."""
        data = getattr(self.config, "data", None)
        names = getattr(data, "train_files", None) or getattr(data, "files", None) or ()
        paths = {name: self.working_dir / name for name in names}
        states = {name: path.stat() for name, path in paths.items() if path.is_file()}
        return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}

    @property
    def settings(self) -> str | None:
        """config.yaml; None if the job has none: a program of the user's, or a script whose run directory has the file.

        Raises:
            UserError: it is larger than what can be read.
        """
        if self.row.trainer is None or type(self.config) is JobConfig:
            return None
        text = dump(self.config)
        if (size := len(text.encode())) > MOST_OWN_BYTES:
            raise UserError(
                f"the configuration has {size:,} bytes, and at most {MOST_OWN_BYTES:,} are read: if it is long because "
                "of its data files, join them into fewer, larger ones"
            )
        return text

    @property
    def name(self) -> str:
        return self.config.slurm.job_name or self.run_dir.name

    @property
    def size(self) -> str:
        """The size of the job, such as `2 nodes x 4 GPUs`."""
        trainer = self.config.trainer
        unit = "GPU" if trainer.uses_gpus else "CPU process"
        return f"{counted(trainer.nnodes, 'node')} x {counted(trainer.n_gpus_per_node, unit)}"

    @cached_property
    def adapted(self) -> Program:
        """The user's own program."""
        return plain(Program(self.program, self.working_dir))

    @cached_property
    def adapter(self) -> Adapter:
        """How the user's own program is saved and resumed.

        Raises:
            UserError: slurm.adapter names no adapter for it.
        """
        return choose(self.config.slurm.adapter, self.kind, self.adapted)

    @property
    def row(self) -> JobKind:
        """The row of KINDS for this job."""
        return KINDS[self.kind]
