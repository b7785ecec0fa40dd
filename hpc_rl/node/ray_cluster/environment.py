"""Environment of a job's Ray processes and of its driver. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpc_rl.node.entry import worker_defaults

_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
_OTHER_CLUSTER = ("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_AUTH_TOKEN")
"""Would lead to a cluster of the user's own, or with a token of their own."""


def shared_environment(
    environ: Mapping[str, str],
    *,
    interface: str,
    threads: int,
    token: Path,
    scratch: Path,
    temp_dir: Path,
    timeline: bool,
) -> dict[str, str]:
    """What Ray's processes and the driver have in common. What the user exported wins over every default here.

    Args:
        token: the file; never its content, which every process of the machine could read in /proc.
        scratch: on the node's own disk; removed at the end, with all that programs leave there.
        temp_dir: Ray's, in it.
        timeline: whether Ray takes notes for one.
    """
    defaults = {
        **worker_defaults(interface, threads),
        "VLLM_LOGGING_LEVEL": "WARN",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",  # would listen on every interface and ask for no token
        **({"RAY_PROFILING": "1"} if timeline else {}),
    }
    fixed = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": str(temp_dir),
        "TMPDIR": str(scratch),
    }
    kept = {name: value for name, value in environ.items() if name not in _OTHER_CLUSTER}
    return {**defaults, **_with_hip(kept), **fixed}


def ray_environment(shared: Mapping[str, str]) -> dict[str, str]:
    """For Ray's own processes: no proxy between them, no pause at the end, no metrics for everybody to read."""
    without_proxies = {name: value for name, value in shared.items() if name.lower() not in _PROXIES}
    nowhere = {"DASHBOARD_METRIC_PORT": "-1"}
    return {**without_proxies, **nowhere, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


def driver_environment(shared: Mapping[str, str], gcs_address: str, python: Path) -> dict[str, str]:
    """For the driver: it finds the cluster by itself, and `python` is the job's."""
    path = f"{python.parent}:{shared['PATH']}" if shared.get("PATH") else str(python.parent)
    return {**shared, "PATH": path, "RAY_ADDRESS": gcs_address}


def _with_hip(environ: dict[str, str]) -> dict[str, str]:
    """Ray refuses Slurm's ROCR_VISIBLE_DEVICES: it wants the same by HIP's name."""
    if devices := environ.pop("ROCR_VISIBLE_DEVICES", None):
        environ.setdefault("HIP_VISIBLE_DEVICES", devices)
    return environ
