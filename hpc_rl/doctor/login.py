"""Checks on the login node: Slurm, the partition, the folder of the runs, Python and the internet connection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hpc_rl.config.job import JobConfig
from hpc_rl.config.slurm import SlurmConfig, walltime_s
from hpc_rl.doctor.checks import Check, ok, problem, warning
from hpc_rl.doctor.packages import package_checks
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.images.run_options import image_preflight
from hpc_rl.slurm import commands
from hpc_rl.slurm.cluster import Partition, chosen, has_accounting, kill_wait_s, preemption
from hpc_rl.slurm.place import Place, here
from hpc_rl.system.disk import file_system
from hpc_rl.system.machine import PythonFacts, file_latency_s, internet_addresses, python_facts, reach
from hpc_rl.system.processes import GRACE_S
from hpc_rl.system.scratch import SHARED

SLOW_FILE_S = 0.1
"""A local disk takes 1 to 10 ms for a small file; NFS and Lustre take 5 to 50 ms if they are not overloaded."""
LEAST_FREE, ENOUGH_FREE = 2 * 10**9, 50 * 10**9
"""Bytes. A checkpoint of a 7B model with its optimizer takes about 90 * 10^9 bytes."""
SHORT_S = 30 * 60
ANSWER_TIMEOUT_S = 20


def slurm_checks(slurm: SlurmConfig) -> list[Check]:
    """Check the cluster, as its controller describes it."""
    if not commands.available():
        return [
            problem("Slurm", "no sbatch on PATH", "run this on a login node, or use --local to check only this machine")
        ]
    if slurm.clusters == "all":
        return [warning("Slurm", "slurm.sbatch.clusters is all", "set it to the names of the clusters to check")]
    names = slurm.clusters.split(",")
    found = {name: _cluster_checks(slurm, here(os.environ, name)) for name in names}
    if len(names) == 1:
        return found[names[0]]
    return [replace(check, name=f"{check.name} ({name})") for name, checks in found.items() for check in checks]


def _cluster_checks(slurm: SlurmConfig, place: Place) -> list[Check]:
    try:
        (config, controllers), partitions = commands.configuration(place), commands.partitions(place)
    except commands.NoAnswer as error:
        return [problem("Slurm", str(error), "check that this is a login node, and the state of the cluster")]
    return [*_controller(config, controllers), _accounting(config), *limit_checks(slurm, config, partitions)]


def _controller(config: Mapping[str, str], controllers: Mapping[str, bool]) -> Iterator[Check]:
    down = [host for host, up in controllers.items() if not up]
    found = f"{config.get('SLURM_VERSION', 'of unknown version')}, controller {', '.join(controllers) or 'unknown'}"
    if down:
        yield warning(
            "Slurm", f"{found}; {', '.join(down)} does not answer", "jobs may start late; contact the cluster's staff"
        )
    else:
        yield ok("Slurm", found)
    grace = kill_wait_s(config)
    if grace < GRACE_S:
        yield warning(
            "KillWait",
            f"Slurm kills a job {grace} s after asking it to end",
            f"the end of a cancelled job's log, which takes up to {GRACE_S:.0f} s, may be missing: use `hpc-rl stop`",
        )


def _accounting(config: Mapping[str, str]) -> Check:
    if not has_accounting(config):
        forgets = config.get("MinJobAge", "300 sec")
        return ok(
            "accounting",
            f"none: the controller keeps a job for {forgets} after its end; the run directory keeps its state",
        )
    kind = config["AccountingStorageType"].rpartition("/")[2]
    enforced = "associations" in config.get("AccountingStorageEnforce", "")
    try:
        accounts = sorted({one.account for one in commands.associations(config.get("ClusterName", ""))})
    except commands.NoAnswer as error:
        return warning("accounting", str(error), "until it answers, squeue and scontrol provide the states of jobs")
    if enforced and not accounts:
        return problem("accounting", "you have no account", "request one from the cluster's staff")
    return ok("accounting", f"{kind}, accounts: {', '.join(accounts) or 'none needed'}")


def limit_checks(slurm: SlurmConfig, config: Mapping[str, str], partitions: list[Partition]) -> Iterator[Check]:
    """Check the time limits and preemption of the partition that a job would use."""
    names = ", ".join(one.name for one in partitions)
    found = chosen(partitions, slurm.partition)
    if found is None and slurm.partition is None:
        yield warning("partition", f"the cluster has no default partition; it has {names}", "set --partition")
        return
    if found is None:
        yield problem("partition", f"there is no {slurm.partition}; the cluster has {names}", "set --partition")
        return
    yield _limits(slurm, found)
    yield _preemption(found, config)


def _limits(slurm: SlurmConfig, found: Partition) -> Check:
    limits = (
        f"{found.name} is {found.state}, at most {found.max_time}, by default {found.default_time}, "
        f"{counted(found.nodes, 'node')}"
    )
    if found.state != "UP":
        return problem("partition", limits, "jobs in it wait; set another --partition")
    most, asked = walltime_s(found.max_time), walltime_s(slurm.time) if slurm.time else None
    if most is not None and asked is not None and asked > most:
        return problem("partition", f"{limits}; slurm.time is {slurm.time}", "such a job never starts: lower --time")
    default = walltime_s(found.default_time)
    if slurm.time is None and default is not None and default < SHORT_S:
        return warning("partition", limits, "a job without --time ends soon: set --time or slurm.time")
    return ok("partition", limits)


def _preemption(found: Partition, config: Mapping[str, str]) -> Check:
    kind, mode = config.get("PreemptType", ""), found.preempt_mode
    if kind.endswith("/none") or not kind or mode == "OFF":
        return ok("preemption", f"no job in {found.name} is preempted")
    return warning(
        "preemption",
        f"jobs in {found.name} may be preempted ({preemption(found, config)})",
        "a run saves and resumes, unless a step and a checkpoint take longer than that: it then repeats what it did "
        "since its last checkpoint (trainer.save_minutes)",
    )


def folder_checks(folder: Path, hf_home: str | None) -> list[Check]:
    """Check the folder of the run directories: whether it looks shared, its latency and its free space.

    Args:
        folder: the folder; it need not exist.
        hf_home: HF_HOME of the jobs, if it differs from this shell's.
    """
    existing = _existing(folder)
    kind = file_system(existing, Path("/proc/self/mounts").read_text())
    try:
        seconds = file_latency_s(existing)
    except OSError as error:
        return [problem("runs", f"{existing}: {error.strerror}", "set --run-dir to a folder that you may write")]
    found = f"{existing} on {kind or 'an unknown file system'}, {1000 * seconds:.1f} ms for a small file"
    if seconds > SLOW_FILE_S:
        checks = [warning("runs", found, "this file system is slow or busy now: a scratch file system may be faster")]
    elif kind not in SHARED:
        remedy = "this looks like a local disk: `hpc-rl doctor --on-nodes 2` checks whether the nodes share it"
        checks = [warning("runs", found, remedy)]
    else:
        checks = [ok("runs", found)]
    cache = Path(hf_home or os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    spaces = [_space("runs", existing), _space("HF_HOME", cache)]
    return [*checks, *spaces, *quota_checks(_quota_text())]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists for this user."""
    return next(place for place in [folder, *folder.absolute().parents] if os.access(place, os.F_OK))


def _space(name: str, path: Path) -> Check:
    existing = _existing(path)
    free = shutil.disk_usage(existing).free
    found = f"{free / 1e9:.0f} GB free for {name} in {existing}"
    if free < LEAST_FREE:
        return problem("free space", found, "remove files, or use another file system")
    if free < ENOUGH_FREE:
        return warning("free space", found, "models and checkpoints take tens of GB: lower trainer.max_ckpt_to_keep")
    return ok("free space", found)


def quota_checks(text: str) -> list[Check]:
    """Check the output of `quota -w` (quota(1)): file system, blocks in kB, quota, limit, then the same for files.

    quota marks a number with * if it exceeds the quota.
    """
    checks = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or not words[1].rstrip("*").isdigit() or not words[3].isdigit():
            continue
        used, limit = int(words[1].rstrip("*")), int(words[3]) or int(words[2].rstrip("*") or 0)
        found = f"{used / 1e6:.1f} of {limit / 1e6:.1f} GB on {words[0]}"
        if "*" in line:
            checks.append(problem("quota", f"exceeded: {found}", "remove files, or ask for a larger quota"))
        elif limit and used > 0.9 * limit:
            checks.append(warning("quota", found, "the next checkpoint may not fit: remove files"))
        else:
            checks.append(ok("quota", found))
    return checks


def _quota_text() -> str:
    """Return the output of quota, or an empty text if it is not installed; Lustre and GPFS have their own commands."""
    try:
        done = subprocess.run(["quota", "-w"], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def python_checks(python: str | None) -> list[Check]:
    """Check the Python of the jobs.

    Args:
        python: slurm.python, or None for this Python.
    """
    if python is None or Path(python) == Path(sys.executable):
        return package_checks(python_facts())
    try:
        asked = [python, "-P", "-m", "hpc_rl.system.machine"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=True)
        facts = PythonFacts.of_json(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        output = getattr(error, "stderr", None)
        lines = [line for line in (output if isinstance(output, str) else "").splitlines() if line.strip()]
        found = f"slurm.python {python}: {(lines or [str(error)])[-1]}"
        return [problem("Python", found, "set slurm.python to a Python that runs here and has hpc-rl installed")]
    return package_checks(facts)


def container_checks(config: JobConfig) -> list[Check]:
    """Check the image of the jobs instead of this machine's Python."""
    inside = f"jobs run in {config.container.image}; `hpc-rl image check` or --on-nodes 1 checks its Python"
    try:
        notes = [note for check in image_preflight(config.container) if (note := check(config.container))]
    except UserError as error:
        return [problem("container", str(error), "set another image: --image, or container.image of the profile")]
    return [*(warning("container", note, "see `hpc-rl doctor --on-nodes 1`") for note in notes), ok("Python", inside)]


def internet_checks() -> list[Check]:
    answers = reach(internet_addresses(os.environ))
    remedies = {
        "Hugging Face": "set https_proxy, or copy models and data from another machine",
        "wandb": "set https_proxy for `hpc-rl wandb sync`, or do not use wandb",
    }
    return [
        warning("internet", f"{name}: {words}", remedies[name]) if words else ok("internet", f"{name} answers")
        for name, words in answers.items()
    ]
