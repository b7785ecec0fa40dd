"""Checks of the reports that the nodes of the doctor's job write. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpc_rl.doctor.checks import Check, merged, ok, problem, warning
from hpc_rl.doctor.diagnosis import LogText, findings
from hpc_rl.doctor.packages import driver_check, package_checks
from hpc_rl.formats.counted import counted
from hpc_rl.formats.node_report import NodeReport, Trial
from hpc_rl.software.installation import install_command
from hpc_rl.software.ray_version import token_authentication
from hpc_rl.system.locks import REMEDY

SLOW_ROUND_TRIP_S = 3.0
SLOW_FILE_S = 0.1
LEAST_SHM, ENOUGH_SHM = 80_000_000, 2 << 30
"""Bytes: the minimum of Ray's object store, and what weights on their way to an engine need."""
LEAST_FILES, ENOUGH_FILES = 1024, 8192
_TOO_LONG, _KILLED = 124, 137
MOST_ADDRESSES = 8
LEAST_SCRATCH = 2 * 10**9
LEAST_NCCL_GB_S = 2.0
"""About the speed of 25 Gbit/s Ethernet; any InfiniBand is faster."""
FAST_INTERFACE = re.compile(r"ib|hsn|roce")


def judge(reports: Sequence[NodeReport]) -> list[Check]:
    """Check all reports of a job, of which there is at least one; equal results of several nodes are merged."""
    of_each = [replace(check, nodes=(report.node,)) for report in reports for check in _of_node(report)]
    return [*_of_all(reports), *merged(of_each)]


def _of_all(reports: Sequence[NodeReport]) -> list[Check]:
    """Check what the nodes did together, as reported by the first one."""
    first = min(reports, key=lambda report: report.rank)
    absent = first.missing or sorted(f"{rank}" for rank in set(range(first.nodes)) - {one.rank for one in reports})
    if absent:
        reason = f"of {counted(first.nodes, 'node')}, {', '.join(absent)} wrote no report"
        return [problem("shared folder", reason, "see the job's log and `sinfo -R`")]
    return [_shared(first), _locks(reports), _folder(reports), _addresses(reports), _all_reduce(first), _ray(first)]


def _of_node(report: NodeReport) -> list[Check]:
    checks: list[Callable[[NodeReport], Check | None]] = [_gpus, _visible, _cpus, _memory, _shm, _files, _locked]
    checks += [_interface, _ports, _scratch, _container]
    found = [check for one in checks if (check := one(report)) is not None]
    driver = driver_check(report.python, report.gpu_driver)
    return [*package_checks(report.python), *([driver] if driver else []), *found, *_internet(report)]


def _shared(first: NodeReport) -> Check:
    if first.round_trip_s is None:
        return ok("shared folder", "not tested with a single node")
    found = f"{first.nodes} nodes read each other's files, round trip {1000 * first.round_trip_s:.0f} ms"
    if first.round_trip_s > SLOW_ROUND_TRIP_S:
        return warning("shared folder", found, "jobs start slowly; use a parallel file system instead of NFS")
    return ok("shared folder", found)


def _locks(reports: Sequence[NodeReport]) -> Check:
    blind = [report.node for report in reports if report.sees_locks is False]
    if blind:
        return problem("file locks", f"{', '.join(blind)} cannot see a lock that the first node holds", REMEDY)
    if all(report.sees_locks is None for report in reports):
        return ok("file locks", "not tested with a single node")
    return ok("file locks", "they reach from node to node")


def _folder(reports: Sequence[NodeReport]) -> Check:
    slowest = max(reports, key=lambda report: report.file_latency_s)
    found = f"{1000 * slowest.file_latency_s:.1f} ms for a small file on the slowest node ({slowest.node})"
    if slowest.file_latency_s > SLOW_FILE_S:
        return warning("run directory", found, "this file system is slow or busy now: another one may be faster")
    return ok("run directory", found)


def _addresses(reports: Sequence[NodeReport]) -> Check:
    named = [f"{one.node} {one.interfaces.get(one.interface, 'none')}" for one in reports]
    more = f" and {len(named) - MOST_ADDRESSES} more" if len(named) > MOST_ADDRESSES else ""
    return ok("addresses", ", ".join(named[:MOST_ADDRESSES]) + more)


def _all_reduce(first: NodeReport) -> Check:
    trial = first.all_reduce
    if trial is None and "torch" in first.python.versions:
        return problem("all-reduce", "the job ended before this test", "run the doctor again")
    if trial is None:
        python = first.python.executable
        return problem("all-reduce", f"not tested: no torch in {python}", install_command("train", python))
    if not trial.result:
        return _failed(
            "all-reduce",
            trial,
            "check the network between the nodes (slurm.interface), then the output with NCCL_DEBUG=INFO",
        )
    result = trial.result
    speed = f"{result['bandwidth_gb_s']:.2f} GB/s, {1e6 * result['latency_s']:.0f} us latency"
    found = f"{result['backend']}, {counted(result['ranks'], 'rank')} on {counted(first.nodes, 'node')}: {speed}"
    if result["backend"] == "gloo" and first.device == "cuda":
        return problem("all-reduce", f"{found}; torch sees no GPU", "install a build of torch for GPUs")
    if result["backend"] == "nccl" and first.nodes > 1 and result["bandwidth_gb_s"] < LEAST_NCCL_GB_S:
        return warning(
            "all-reduce",
            found,
            "slow like Ethernet: set slurm.interface to an InfiniBand interface",
        )
    return ok("all-reduce", found)


def _ray(first: NodeReport) -> Check:
    trial = first.ray
    if trial is None and token_authentication(first.python.versions.get("ray", "0")):
        return problem("Ray cluster", "the job ended before this test", "run the doctor again")
    if trial is None:
        remedy = install_command("rl", first.python.executable)
        return warning("Ray cluster", "not tested: no Ray with token authentication", remedy)
    if not trial.result:
        return _failed("Ray cluster", trial, "only reinforcement learning needs it")
    hosts, cpus, gpus = len(trial.result["hosts"]), round(trial.result["cpus"]), round(trial.result["gpus"])
    resources = f"{counted(cpus, 'CPU')} and {counted(gpus, 'GPU')}"
    found = f"started and stopped on {counted(hosts, 'node')} with {resources} in {trial.seconds:.0f} s"
    return ok("Ray cluster", found)


def _failed(name: str, trial: Trial, remedy: str) -> Check:
    """Return the problem, with the remedy of a known failure if there is one."""
    how = {_TOO_LONG: "it took too long", _KILLED: "killed (signal 9) by a user or a program, or for lack of memory"}
    result = f"({how.get(trial.exit_code, f'exit code {trial.exit_code}')}): {trial.said}"
    known = findings([LogText(name, result)])
    return problem(name, f"failed after {trial.seconds:.0f} s {result}", known[0].failure.fix if known else remedy)


def _gpus(report: NodeReport) -> Check | None:
    granted = int(report.environ.get("SLURM_GPUS_ON_NODE") or 0)
    names = " + ".join(f"{report.gpus.count(name)} x {name}" for name in dict.fromkeys(report.gpus)) or "none visible"
    found = f"{names}, driver {report.gpu_driver or 'missing'}, {granted} granted"
    if report.device == "cpu":
        return ok("GPUs", found) if report.gpus or granted else None
    if granted >= report.processes > len(report.gpus):
        return problem(
            "GPUs",
            found,
            "the node has no driver, or the container does not bind it (--nv)",
        )
    if len(report.gpus) < report.processes:
        remedy = "request GPUs in the form that this cluster expects: --gpus-per-node, or --sbatch gres=gpu:TYPE:N"
        return problem("GPUs", f"{found}, {report.processes} requested", remedy)
    return ok("GPUs", found)


def _visible(report: NodeReport) -> Check | None:
    """Check that the step, and not only the batch script, has the variable that names its GPUs."""
    granted = int(report.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if not granted:
        return None
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    visible = {name: report.environ[name] for name in names if report.environ.get(name)}
    found = ", ".join(f"{name}={value}" for name, value in visible.items())
    if not visible:
        return warning(
            "visible GPUs",
            f"Slurm grants {counted(granted, 'GPU')}, but the step has no CUDA_VISIBLE_DEVICES",
            "jobs on a shared node may use each other's GPUs: request whole nodes (--sbatch exclusive)",
        )
    if min(len(value.split(",")) for value in visible.values()) != granted:
        return problem(
            "visible GPUs",
            f"{found}, but Slurm grants {granted}",
            "remove it from slurm.setup and slurm.env",
        )
    return ok("visible GPUs", found)


def _cpus(report: NodeReport) -> Check:
    asked = int(report.environ.get("SLURM_CPUS_PER_TASK") or 0)
    found = f"{report.cpus} granted" + (f", {asked} requested" if asked else "")
    if report.cpus < asked:
        return problem("CPUs", found, "set SRUN_CPUS_PER_TASK in your template, since srun does not inherit -c")
    return ok("CPUs", found)


def _memory(report: NodeReport) -> Check:
    asked = int(report.environ.get("SLURM_MEM_PER_NODE") or 0) << 20
    found = f"{report.memory / 2**30:.1f} GiB granted" + (f", {asked / 2**30:.1f} requested" if asked else "")
    if report.memory < 0.99 * asked:
        return problem("memory", found, "the cgroup grants less than Slurm: contact the cluster's staff")
    return ok("memory", found)


def _shm(report: NodeReport) -> Check:
    found = f"{report.shm_free / 2**30:.1f} of {report.shm_total / 2**30:.1f} GiB free"
    if report.shm_free < LEAST_SHM:
        return problem("/dev/shm", found, "Ray cannot start; in a container, bind the host's /dev/shm")
    if report.shm_free < ENOUGH_SHM:
        return warning("/dev/shm", found, "Ray's objects and weights for vLLM need it: request more --mem")
    return ok("/dev/shm", found)


def _files(report: NodeReport) -> Check:
    found = "no limit" if report.open_files < 0 else f"at most {report.open_files}"
    if 0 <= report.open_files < LEAST_FILES:
        return problem("open files", found, "Ray needs thousands: raise ulimit -n in slurm.setup")
    if 0 <= report.open_files < ENOUGH_FILES:
        return warning("open files", found, "large Ray jobs need more: raise ulimit -n in slurm.setup")
    return ok("open files", found)


def _locked(report: NodeReport) -> Check:
    if report.locked_memory < 0:
        return ok("locked memory", "no limit")
    found = f"at most {report.locked_memory / 2**20:.0f} MiB"
    if any(FAST_INTERFACE.match(name) for name in report.interfaces):
        return warning("locked memory", found, "InfiniBand needs no limit (ulimit -l): contact the cluster's staff")
    return ok("locked memory", found)


def _interface(report: NodeReport) -> Check:
    there = ", ".join(report.interfaces)
    if report.interface_problem:
        return problem("interface", report.interface_problem, "")
    fast = [name for name in report.interfaces if FAST_INTERFACE.match(name)]
    if report.nodes > 1 and fast and report.interface not in fast:
        return warning("interface", f"{report.interface} of {there}", f"set slurm.interface={fast[0]}, which is faster")
    return ok("interface", f"{report.interface} of {there}")


def _ports(report: NodeReport) -> Check:
    if report.ports_problem:
        return problem("ports", report.ports_problem, "")
    return ok("ports", "enough consecutive ports for Ray are free")


def _scratch(report: NodeReport) -> Check:
    found = f"{report.scratch_free / 1e9:.0f} GB free in {report.scratch}"
    if report.scratch_free < LEAST_SCRATCH:
        return warning("temporary folder", found, "Ray needs it: set slurm.env.TMPDIR to a local disk with more space")
    if report.scratch_problem:
        remedy = "libraries compile code there: set slurm.env.TMPDIR to a local disk that is mounted without noexec"
        return warning("temporary folder", f"{report.scratch_problem}; {found}", remedy)
    return ok("temporary folder", found)


def _container(report: NodeReport) -> Check:
    inside = report.environ.get("APPTAINER_CONTAINER") or report.environ.get("SINGULARITY_CONTAINER")
    if inside:
        return ok("container", f"inside {inside}")
    return ok(
        "container", f"found {', '.join(report.runtimes)}" if report.runtimes else "no runtime on PATH, none in use"
    )


def _internet(report: NodeReport) -> list[Check]:
    offline = {
        "Hugging Face": report.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        "wandb": report.environ.get("WANDB_MODE") in ("offline", "disabled"),
    }
    settings = {"Hugging Face": "cache.offline=true", "wandb": "trainer.wandb_mode=offline or cache.offline=true"}
    checks = []
    for name, words in report.internet.items():
        if not words:
            checks.append(ok("internet", f"{name} answers"))
        elif offline[name]:
            checks.append(ok("internet", f"{name} does not answer, and is not used (offline is set)"))
        else:
            checks.append(warning("internet", f"{name}: {words}", f"set {settings[name]}"))
    return checks
