"""What can be told on the login node: Slurm, the partition, the folder of the runs, Python, the internet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from hpc_rl.config.job import JobConfig
from hpc_rl.config.slurm import SlurmConfig, walltime_s
from hpc_rl.doctor.findings import Check, ok, problem, warning
from hpc_rl.doctor.packages import package_checks
from hpc_rl.errors import UserError
from hpc_rl.host.machine import PythonFacts, file_latency_s, internet_addresses, python_facts, reach
from hpc_rl.host.processes import GRACE_S
from hpc_rl.host.scratch import SHARED, file_system
from hpc_rl.images import preflight as image_preflight
from hpc_rl.slurm import commands
from hpc_rl.slurm.cluster import Partition, chosen, has_accounting

SLOW_FILE_S = 0.1
"""A local disk takes 1 to 10 ms for a small file, NFS and Lustre 5 to 50 when they are well."""
LEAST_FREE, ENOUGH_FREE = 2 * 10**9, 50 * 10**9
"""Bytes. A checkpoint of a 7B model with its optimizer takes about 90 * 10^9."""
SHORT_S = 30 * 60
ANSWER_TIMEOUT_S = 20


def slurm_checks(slurm: SlurmConfig) -> list[Check]:
    """The cluster, as its controller describes it."""
    if not commands.available():
        return [
            problem("Slurm", "no sbatch on PATH", "run this on a login node, or with --local for this machine alone")
        ]
    try:
        (config, controllers), partitions = commands.configuration(), commands.partitions()
    except commands.NoAnswer as error:
        return [problem("Slurm", str(error), "is this a login node, and is the cluster in maintenance?")]
    return [*_controller(config, controllers), _accounting(config), *partition_checks(slurm, config, partitions)]


def _controller(config: Mapping[str, str], controllers: Mapping[str, bool]) -> Iterator[Check]:
    down = [host for host, up in controllers.items() if not up]
    found = f"{config.get('SLURM_VERSION', 'of unknown version')}, controller {', '.join(controllers) or 'unknown'}"
    if down:
        yield warning(
            "Slurm", f"{found}; {', '.join(down)} does not answer", "jobs may start late; ask the cluster's staff"
        )
    else:
        yield ok("Slurm", found)
    grace = int((config.get("KillWait") or "30").split()[0])
    if grace < GRACE_S:
        yield warning(
            "KillWait",
            f"Slurm kills {grace} s after it asks a job to end",
            f"logs of cancelled jobs may lack their end, which takes up to {GRACE_S:.0f} s: use `hpc-rl stop`",
        )


def _accounting(config: Mapping[str, str]) -> Check:
    if not has_accounting(config):
        forgets = config.get("MinJobAge", "300 sec")
        return ok(
            "accounting", f"none: the controller forgets a job {forgets} after its end, the run directory does not"
        )
    kind = config["AccountingStorageType"].rpartition("/")[2]
    enforced = "associations" in config.get("AccountingStorageEnforce", "")
    try:
        accounts = sorted({one.account for one in commands.associations(config.get("ClusterName", ""))})
    except commands.NoAnswer as error:
        return warning("accounting", str(error), "states of jobs come from squeue and scontrol meanwhile")
    if enforced and not accounts:
        return problem("accounting", "you have no account", "ask the cluster's staff for one")
    return ok("accounting", f"{kind}, accounts: {', '.join(accounts) or 'none needed'}")


def partition_checks(slurm: SlurmConfig, config: Mapping[str, str], partitions: list[Partition]) -> Iterator[Check]:
    """Time limits and preemption of the partition that a job would go to."""
    names = ", ".join(one.name for one in partitions)
    found = chosen(partitions, slurm.partition)
    if found is None and slurm.partition is None:
        yield warning("partition", f"the cluster has no default one; there are {names}", "give one: --partition")
        return
    if found is None:
        yield problem("partition", f"there is no {slurm.partition}; there are {names}", "give one of them: --partition")
        return
    yield _limits(slurm, found)
    yield _preemption(found, config)


def _limits(slurm: SlurmConfig, found: Partition) -> Check:
    limits = (
        f"{found.name} is {found.state}, at most {found.max_time}, by default {found.default_time}, {found.nodes} nodes"
    )
    if found.state != "UP":
        return problem("partition", limits, "jobs there wait; give another --partition")
    most, asked = walltime_s(found.max_time), walltime_s(slurm.time) if slurm.time else None
    if most is not None and asked is not None and asked > most:
        return problem("partition", f"{limits}; slurm.time is {slurm.time}", "such a job never starts: lower --time")
    default = walltime_s(found.default_time)
    if slurm.time is None and default is not None and default < SHORT_S:
        return warning("partition", limits, "a job without --time ends soon: give --time or slurm.time")
    return ok("partition", limits)


def _preemption(found: Partition, config: Mapping[str, str]) -> Check:
    kind, mode = config.get("PreemptType", ""), found.preempt_mode
    if kind.endswith("/none") or not kind or mode == "OFF":
        return ok("preemption", f"no job in {found.name} is preempted")
    return warning(
        "preemption",
        f"jobs in {found.name} may be preempted ({mode}), with {found.grace_s} s of warning",
        "save often: trainer.save_minutes is what you may lose; a requeued job goes on from its last checkpoint",
    )


def folder_checks(folder: Path, hf_home: str | None) -> list[Check]:
    """The place of the run directories: does it look shared, how quick is it, how much room is left.

    Args:
        folder: it, or where it would be made.
        hf_home: HF_HOME of the jobs, where it is not this shell's.
    """
    existing = _existing(folder)
    kind = file_system(existing, Path("/proc/self/mounts").read_text())
    try:
        seconds = file_latency_s(existing)
    except OSError as error:
        return [problem("runs", f"{existing}: {error.strerror}", "give a place that you may write: --run-dir")]
    found = f"{existing} on {kind or 'an unknown file system'}, {1000 * seconds:.1f} ms for a small file"
    if seconds > SLOW_FILE_S:
        checks = [warning("runs", found, "this file system is slow or busy now: a scratch one may serve better")]
    elif kind not in SHARED:
        sure = "that looks like this machine's own disk: `hpc-rl doctor --on-nodes 2` tells whether nodes see it"
        checks = [warning("runs", found, sure)]
    else:
        checks = [ok("runs", found)]
    cache = Path(hf_home or os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    spaces = [_space("runs", existing), _space("HF_HOME", cache)]
    return [*checks, *spaces, *quota_checks(_quota_text())]


def _existing(folder: Path) -> Path:
    """It, or the nearest folder above it that there is for this user."""
    return next(place for place in [folder, *folder.absolute().parents] if os.access(place, os.F_OK))


def _space(name: str, path: Path) -> Check:
    existing = _existing(path)
    free = shutil.disk_usage(existing).free
    found = f"{free / 1e9:.0f} GB free for {name} in {existing}"
    if free < LEAST_FREE:
        return problem("free space", found, "make room, or use another file system")
    if free < ENOUGH_FREE:
        return warning("free space", found, "models and checkpoints take tens of GB: lower trainer.max_ckpt_to_keep")
    return ok("free space", found)


def quota_checks(text: str) -> list[Check]:
    """Output of `quota -w` (quota(1)): file system, blocks in kB, quota, limit, then the same for files.

    A used number is marked by a * where it is over its quota.
    """
    checks = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or not words[1].rstrip("*").isdigit() or not words[3].isdigit():
            continue
        used, limit = int(words[1].rstrip("*")), int(words[3]) or int(words[2].rstrip("*") or 0)
        found = f"{used / 1e6:.1f} of {limit / 1e6:.1f} GB on {words[0]}"
        if "*" in line:
            checks.append(problem("quota", f"over it: {found}", "remove files, or have it raised"))
        elif limit and used > 0.9 * limit:
            checks.append(warning("quota", found, "a checkpoint may not fit any more"))
        else:
            checks.append(ok("quota", found))
    return checks


def _quota_text() -> str:
    """Empty where quotas are not known here: Lustre and GPFS have commands of their own."""
    try:
        done = subprocess.run(["quota", "-w"], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def python_checks(python: str | None) -> list[Check]:
    """The Python of the jobs.

    Args:
        python: slurm.python, where it is another one.
    """
    if python is None or Path(python) == Path(sys.executable):
        return package_checks(python_facts())
    try:
        asked = [python, "-P", "-m", "hpc_rl.host.machine"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=True)
        facts = PythonFacts.of_json(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        said = getattr(error, "stderr", None)
        words = [line for line in (said if isinstance(said, str) else "").splitlines() if line.strip()] or [str(error)]
        return [
            problem("Python", f"slurm.python {python}: {words[-1]}", "it has to run here, and to have hpc-rl installed")
        ]
    return package_checks(facts)


def container_checks(config: JobConfig) -> list[Check]:
    """The image of the jobs, in place of this machine's Python."""
    found = [_image_check(partial(one, config.container)) for one in image_preflight.container_checks(config.container)]
    asked = f"jobs run in {config.container.image}, whose Python is not looked at here"
    return [*filter(None, found), ok("Python", f"{asked}: `hpc-rl image check`, or --on-nodes 1")]


def _image_check(check: Callable[[], str | None]) -> Check | None:
    try:
        note = check()
    except UserError as error:
        return problem("container", str(error), "give another one: --image, or container.image of the profile")
    return warning("container", note, "see `hpc-rl doctor --on-nodes 1`") if note else None


def internet_checks() -> list[Check]:
    answers = reach(internet_addresses(os.environ))
    remedies = {
        "Hugging Face": "set https_proxy, or copy models and data from elsewhere",
        "wandb": "set https_proxy for `hpc-rl wandb sync`, or leave wandb out",
    }
    return [
        warning("internet", f"{name}: {words}", remedies[name]) if words else ok("internet", f"{name} answers")
        for name, words in answers.items()
    ]
