"""python -m hpc_rl.rl.main_ppo [--run-dir DIR] --config FILE | key=value ...

Reinforcement learning on the Ray cluster that RAY_ADDRESS names, as `hpc-rl submit ppo` starts it, or on one started
here. The run directory is the run: started again in the same one, it goes on from the newest checkpoint. Exit codes:
0 done, 75 stopped and saved, 2 bad input, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.config.compose import compose, dump, load_config
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.host.files import Follower
from hpc_rl.run_dir import RunDir, current_attempt_dir, current_run_dir

_LOG_POLL_S = 0.1
_PARENT = Path("runs")

WORKER_ENV = {
    "NCCL_CUMEM_ENABLE": "0",  # saves memory where vLLM and a trainer share a GPU, as verl and OpenRLHF set it
    "NCCL_DEBUG": "WARN",
    "TOKENIZERS_PARALLELISM": "true",
    "VLLM_LOGGING_LEVEL": "WARN",
}
"""What every process of the run gets, unless the user exported something else."""
CPU_WORKER_ENV = {
    # glibc would give memory back to the kernel after each pass, and page faults slow generation down
    # (mallopt(3); 32 MiB is the largest threshold that it takes).
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


class Runner(Protocol):
    """What run_ppo asks of a task runner."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int: ...


class TaskRunner:
    """The driver: a Ray actor of its own, so that it runs inside the cluster however that was reached."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        """Train; the exit code. Its output goes to `driver.log` in the folder of logs."""
        from hpc_rl.rl.setup import set_up
        from hpc_rl.rl.trainer import train
        from hpc_rl.rl.workers.process import log_to, quiet_libraries
        from hpc_rl.tracking.report import failure_reported

        log_to(driver_log(logs))
        quiet_libraries()
        state = set_up(config, run, logs)
        try:
            with failure_reported(run):
                return train(state)
        finally:
            state.scoring.close()
            try:
                state.rollout.close()
            except RunError as error:  # what the run has reached counts all the same
                print(f"warning: {error}", flush=True)


def run_ppo(config: PpoConfig, task_runner_class: type[Runner] | None = None, run: RunDir | None = None) -> int:
    """Train to the end, or until the stop file is there, on the Ray that this process is connected to, or that
    initialise_ray finds.

    Args:
        task_runner_class: a class with TaskRunner's method `run`, in its place.
        run: the run directory; that of the job, or a new one below `runs/`, where not given.

    Returns:
        the process's exit code: 0, or 75 where starting again goes on.

    Raises:
        UserError: what the user asked for cannot work.
        RunError: it went wrong while running.
    """
    run = run or current_run_dir() or _new_run()
    logs = current_attempt_dir() or _new_attempt(run, config)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from hpc_rl.rl.pools import release_pools

    connected = ray.is_initialized()
    is_own = not connected and initialise_ray(config, logs)

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote = ray.remote(task_runner_class or TaskRunner)
    # Actors that an actor starts inherit its environment; a cluster of our own has it from this process already.
    runtime = {} if is_own else {"runtime_env": {"env_vars": worker_environment(config)}}
    # The driver computes next to nothing, and the slots are the workers'.
    runner = remote.options(num_cpus=0, scheduling_strategy=here, **runtime).remote()
    try:
        code = _follow(runner.run.remote(config, run, logs), driver_log(logs))
        if is_own and config.ray_kwargs.timeline_json_file:  # of a job's cluster the node entry writes it
            ray.timeline(config.ray_kwargs.timeline_json_file)
    finally:
        if connected:  # Ray ends the driver's workers with it, but keeps its pools
            ray.kill(runner)
            release_pools(str(logs))
        else:
            ray.shutdown()
    return code


def initialise_ray(config: PpoConfig, logs: Path) -> bool:
    """Connect to the cluster of RAY_ADDRESS, or start one on this machine, which ends with this process.

    Returns:
        whether it was started here.
    """
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning", **config.ray_kwargs.ray_init}
    if address:
        options.pop("num_cpus", None)  # the cluster has its own; Ray refuses to be told another
        options["address"] = address
    else:
        os.environ.update(worker_environment(config))
        _authenticate(logs)
        slots = config.trainer.n_gpus_per_node * config.trainer.nnodes
        if config.trainer.device == "cpu":
            options.setdefault("num_cpus", max(slots, len(os.sched_getaffinity(0))))
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    import ray

    try:
        ray.init(**options)
    except (ConnectionError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"Ray does not start or answer (RAY_ADDRESS, ray_kwargs.ray_init): {first}") from error
    return not address


def worker_environment(config: PpoConfig) -> dict[str, str]:
    defaults = WORKER_ENV | (CPU_WORKER_ENV if config.trainer.device == "cpu" else {})
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def driver_log(logs: Path) -> Path:
    return logs / "driver.log"


def _authenticate(logs: Path) -> None:
    """A token for a cluster of our own: without one, anybody who reaches its ports runs code as this user."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    token = logs / "ray.token"
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(descriptor, secrets.token_hex(32).encode())
    os.close(descriptor)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    from ray._raylet import Config

    Config.initialize("")  # Ray has read the mode already, when it was imported


def _follow(ref: Any, log: Path) -> int:
    """Print the driver's output until it ends; its exit code."""
    import ray

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
        raise RunError(f"the driver died ({str(error).splitlines()[0]}); its log is {log}") from error
    return code


def _new_run() -> RunDir:
    """A run directory of its own for a run without a job."""
    while True:
        path = _PARENT / f"ppo-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            time.sleep(0.1)
            continue
        print(f"run directory: {path}", flush=True)
        return RunDir(path.absolute())


def _new_attempt(run: RunDir, config: PpoConfig) -> Path:
    """What a job script does for a start that has none."""
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    run.config.write_text(dump(config))
    run.stop.unlink(missing_ok=True)
    attempt = run.path / f"attempt-{len(run.attempts()) + 1}"
    attempt.mkdir(parents=True, mode=0o700)
    return attempt


def parse(arguments: Sequence[str]) -> tuple[PpoConfig, RunDir | None]:
    """Configuration and run directory.

    Raises:
        UserError: anything wrong with them.
    """
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.rl.main_ppo", description=__doc__)
    parser.add_argument("--config", type=Path, help="resolved configuration (config.yaml of a run directory)")
    parser.add_argument("--run-dir", type=Path, help="default: $HPC_RL_RUN_DIR, or a new one below runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    if options.config and options.overrides:
        raise UserError(f"--config {options.config} is complete: change the file, or give key=value alone")
    config = load_config("ppo", options.config) if options.config else compose("ppo", options.overrides)
    assert isinstance(config, PpoConfig)
    return config, RunDir(options.run_dir.absolute()) if options.run_dir else None


def main(arguments: Sequence[str]) -> int:
    try:
        config, run = parse(arguments)
        return run_ppo(config, run=run)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"hpc-rl: {line}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the last stop: says what failed, then leaves
        traceback.print_exc()
        cause = getattr(error, "cause", error)  # Ray wraps what an actor raised
        first = str(cause).strip().splitlines()
        print(f"hpc-rl: {type(cause).__name__}{': ' + first[0] if first else ''}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
