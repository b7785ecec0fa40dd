"""The environment of a job's Ray processes and of its driver. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpc_rl.liveness.heartbeat import ENV_HEARTBEATS, HEARTBEATS
from hpc_rl.software.proxies import set_aside
from hpc_rl.system.scratch import programs_tmpdir

_OTHER_CLUSTER = ("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_AUTH_TOKEN")
"""Variables that would lead to another cluster of the user, or that hold the token of one."""


def shared_environment(
    environ: Mapping[str, str],
    workers: Mapping[str, str],
    *,
    token: Path,
    scratch: Path,
    temp_dir: Path,
    timeline: bool,
    start_timeout_s: int,
) -> dict[str, str]:
    """Return the variables that Ray's processes and the driver share. Variables that the user exported take precedence.

    Args:
        workers: the defaults of training processes.
        token: the file. The token itself would be readable in /proc.
        scratch: folder on the node's own disk, which is removed at the end.
        temp_dir: Ray's folder in it.
        timeline: whether Ray records a timeline.
        start_timeout_s: time in which Ray has to be up, and in which its agents and each of its workers have to start.
            Ray's own limits are 30 and 60 s, which a busy node or a slow file system may exceed.
    """
    defaults = {
        **workers,
        "VLLM_LOGGING_LEVEL": "WARN",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",  # it would listen on every interface without a token
        "RAY_worker_niceness": "0",  # Ray's 15 leaves its workers 2 % of a core that another user keeps busy
        "RAY_agent_register_timeout_ms": str(1000 * start_timeout_s),
        "RAY_worker_register_timeout_seconds": str(start_timeout_s),
        **({"RAY_PROFILING": "1"} if timeline else {}),
    }
    fixed = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(temp_dir),
        "TMPDIR": programs_tmpdir(environ, scratch),
        ENV_HEARTBEATS: str(scratch / HEARTBEATS),
    }
    kept = {name: value for name, value in environ.items() if name not in _OTHER_CLUSTER}
    return {**defaults, **kept, **fixed}


def ray_environment(shared: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Ray's own processes: no proxies (their workers have them), no pause at the end, and no
    public metrics port."""
    no_metrics = {"DASHBOARD_METRIC_PORT": "-1"}
    return {**set_aside(shared), **no_metrics, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


def driver_environment(shared: Mapping[str, str], gcs_address: str, python: Path) -> dict[str, str]:
    """Return the driver's environment: `ray.init()` finds the cluster, and `python` on PATH is the job's."""
    path = f"{python.parent}:{shared['PATH']}" if shared.get("PATH") else str(python.parent)
    return {**shared, "PATH": path, "RAY_ADDRESS": gcs_address}
