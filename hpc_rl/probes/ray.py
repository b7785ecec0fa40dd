"""The driver of the doctor's test of Ray: one task on every node.

Writes result.json into the attempt's folder.
"""

from __future__ import annotations

import json
import os

import ray

from hpc_rl.run_dir import current_attempt_dir

TASK_TIMEOUT_S = 60


def main() -> None:
    os.chdir("/")  # Ray's workers look for modules in the driver's folder first
    ray.init(logging_level="error")
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.remote(num_cpus=1)(_host_name)
    tasks = [here.options(resources={f"node:{node['NodeManagerAddress']}": 0.01}).remote() for node in nodes]
    result = {
        "hosts": ray.get(tasks, timeout=TASK_TIMEOUT_S),
        "cpus": ray.cluster_resources().get("CPU", 0),
        "gpus": ray.cluster_resources().get("GPU", 0),
    }
    folder = current_attempt_dir()
    if folder is not None:
        (folder / "result.json").write_text(json.dumps(result) + "\n")


def _host_name() -> str:
    return os.uname().nodename


if __name__ == "__main__":
    main()
