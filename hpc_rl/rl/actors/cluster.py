"""What a job script provides, for a run that is started without one: a run directory, an attempt and a Ray cluster.

In a job, `connected` finds the job's cluster in RAY_ADDRESS.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hpc_rl.config.compose import dump
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.rl.actors.deaths import ActorLabel, died
from hpc_rl.rl.actors.pools import release_pools
from hpc_rl.run_dir import RunDir
from hpc_rl.software.environment import tokenizer_defaults
from hpc_rl.software.ray_python import quoted_python
from hpc_rl.software.ray_token import make_token
from hpc_rl.system.accelerators import ENV_RAY_HIDES, collective_defaults
from hpc_rl.system.deaths import remember_oom_kills
from hpc_rl.system.files import Follower, write_atomically
from hpc_rl.system.scratch import job_scratch
from hpc_rl.system.search_path import safe_variables

_LOG_POLL_S = 0.1
_STARTS = 3
_TOO_SLOW = "timed out during startup"  # in the message of ray._private.node.Node

_CPU_DEFAULTS = {
    # By default glibc returns memory to the kernel after each pass, and the page faults slow down generation
    # (mallopt(3); 32 MiB is the largest threshold that it accepts).
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


DriverConfig = PpoConfig | GenerateConfig
"""Configurations of the jobs that have a driver."""


class DriverProgram(Protocol):
    """The driver's class, as `run_driver` uses it."""

    def run(self, config: Any, run: RunDir, logs: Path) -> int:
        """Do the work and return the exit code."""
        ...


def run_driver(config: DriverConfig, runner_class: type[DriverProgram], run: RunDir, logs: Path) -> int:
    """Run the driver in an actor, so that it is inside the cluster, and print its output. Return its exit code.

    Args:
        logs: the attempt's folder; the driver writes `driver.log` there.

    Raises:
        UserError: the run cannot work as requested.
        RunError: the driver died.
    """
    if not ray.is_initialized():
        with connected(config, logs) as started_here:
            _, ref = _start_driver(config, runner_class, run, logs, started_here)
            code = _follow(ref, driver_log(logs))
            if started_here and config.ray_kwargs.timeline_json_file:  # in a job, the node entry writes the timeline
                ray.timeline(config.ray_kwargs.timeline_json_file)
            return code
    runner, ref = _start_driver(config, runner_class, run, logs, started_here=False)
    try:
        return _follow(ref, driver_log(logs))
    finally:  # with the driver, Ray ends its workers but not its placement groups
        ray.kill(runner)
        release_pools(str(logs))


def _start_driver(
    config: DriverConfig, runner_class: type[DriverProgram], run: RunDir, logs: Path, started_here: bool
) -> tuple[Any, Any]:
    """Start the driver's actor on this node; return it and the reference to its exit code."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Actors inherit the environment of the actor that starts them. A cluster started here inherits this process's.
    runtime = {} if started_here else {"runtime_env": {"env_vars": worker_environment(config)}}
    # The driver computes almost nothing, so it takes none of the workers' CPUs.
    runner = ray.remote(runner_class).options(num_cpus=0, scheduling_strategy=here, **runtime).remote()
    return runner, runner.run.remote(config, run, logs)


@contextlib.contextmanager
def connected(config: DriverConfig, logs: Path) -> Iterator[bool]:
    """Connect to the cluster in RAY_ADDRESS, or start one on this machine that ends with the block.

    Its files are in a private folder in /tmp, where the paths of Ray's sockets are short enough: Ray makes its own
    folder accessible to everyone.

    Returns:
        whether a cluster was started.

    Raises:
        UserError: Ray does not start, or the cluster does not answer.
    """
    with contextlib.ExitStack() as stack:
        starts = not os.environ.get("RAY_ADDRESS")
        scratch = stack.enter_context(job_scratch({}, "ray", logs, 0)) if starts else None
        stack.callback(ray.shutdown)
        _connect(config, logs, scratch)
        yield starts


def _connect(config: DriverConfig, logs: Path, scratch: Path | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning", **config.ray_kwargs.ray_init}
    if scratch is None:
        options.pop("num_cpus", None)  # Ray accepts this option only if it starts the cluster
        options["address"] = os.environ["RAY_ADDRESS"]
    else:
        os.environ.update(worker_environment(config))
        remember_oom_kills(os.environ)
        _authenticate(logs)
        slots = config.trainer.n_gpus_per_node * config.trainer.nnodes
        if config.trainer.computes_on == "cpu":
            options.setdefault("num_cpus", max(slots, len(os.sched_getaffinity(0))))
        # Without an address, Ray joins the cluster that a file in /tmp names, which any user can write.
        options = (
            {"address": "local", "_temp_dir": str(scratch / "ray")}
            | options
            | {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        )
    try:
        start_ray(**options)
    except (OSError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"Ray does not start or answer (RAY_ADDRESS, ray_kwargs.ray_init): {first}") from error


def start_ray(**options: Any) -> None:
    """Call `ray.init`, again if Ray's processes are too slow: on a busy machine they need more than Ray's fixed 30 s.

    The processes of a failed start end with this process.
    """
    if options.get("address", "local") == "local":  # the nodes of a job start their workers with a path without spaces
        options["runtime_env"] = quoted_python() | options.get("runtime_env", {})
    options.setdefault("job_config", _without_folders())
    for tries in range(1, _STARTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray has no type for it
            if _TOO_SLOW not in str(error):
                raise
            if tries == _STARTS:
                load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
                raise UserError(
                    f"Ray's processes did not start within 30 s, {_STARTS} times. This machine has a load of "
                    f"{load:.0f} on {counted(cpus, 'CPU')}: run on a machine with less load"
                ) from error


class _NoFolders(list[str]):
    """The folders of a driver that all workers look into before Python's own modules. It stays empty."""

    def extend(self, _folders: Iterable[str]) -> None:
        """Ignore the working folder and that of the driver, which `ray.init` adds."""


def _without_folders() -> JobConfig:
    """Return the settings of a job whose workers look for modules where this process does, with -P."""
    settings = JobConfig()
    settings._py_driver_sys_path = _NoFolders()
    return settings


def new_run(kind: str) -> RunDir:
    """Create a run directory below `runs/`, which begins with the kind of the job."""
    while True:
        path = Path("runs", time.strftime(f"{kind}-%Y%m%d-%H%M%S"))
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            time.sleep(0.1)
            continue
        print(f"run directory: {path}", flush=True)
        return RunDir(path.absolute())


def new_attempt(run: RunDir, config: DriverConfig) -> Path:
    """Create the folder of the next attempt, and write the files of the run directory that a job script writes."""
    text = dump(config)
    write_atomically(run.config, text)
    run.stop.unlink(missing_ok=True)
    attempt = run.next_attempt()
    attempt.mkdir(parents=True, mode=0o700)
    write_atomically(attempt / run.config.name, text)  # what this attempt ran with
    return attempt


def worker_environment(config: DriverConfig) -> dict[str, str]:
    """Return the variables that every process of the run needs. A variable that the user exported keeps its value."""
    device = config.trainer.computes_on
    quiet_and_equal = {"VLLM_LOGGING_LEVEL": "WARN", "RAY_worker_niceness": "0", ENV_RAY_HIDES: "1"}
    defaults = {**collective_defaults(device), **tokenizer_defaults(), **quiet_and_equal}
    if device == "cpu":
        defaults |= _CPU_DEFAULTS
    if isinstance(config, PpoConfig):
        defaults |= config.carrier_spec.environment
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | safe_variables()


def driver_log(logs: Path) -> Path:
    """Return the path of the driver's log."""
    return logs / "driver.log"


def _authenticate(logs: Path) -> None:
    """Protect the cluster that is about to start with a token."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    token = logs / "ray.token"
    make_token(token)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    from ray._raylet import Config

    Config.initialize("")  # Ray read the mode when it was imported; read it again


def _follow(ref: Any, log: Path) -> int:
    """Print the driver's output until the driver ends, and return its exit code."""
    follower = Follower(log)
    done: list[Any] = []
    while not done:
        done, _ = ray.wait([ref], timeout=_LOG_POLL_S)
        print(follower.new_text(), end="", flush=True)
    try:
        code: int = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise died(ActorLabel("the driver", "driver", log), error) from error
    return code
