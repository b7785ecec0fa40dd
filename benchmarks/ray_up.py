"""Time from the start of a Slurm step to a driver connected to all nodes: `python -m benchmarks.ray_up`.

It runs on the sandbox: a real Slurm whose nodes are namespaces of this machine, so that all of them share its cores. It
needs root, as the sandbox does. Variants, each as one srun step on N nodes:

- hpc-rl: hpc_rl.node.ray_cluster.node, as a job script starts it.
- bare starts: `ray start --head` on every node at the same time, until the last one is up, without a cluster and a
  driver: the least that this number of nodes costs on this machine.
- sleeping script: the head, 10 s, then a worker every 5 s, then the driver, as in the scripts of other projects.
- symmetric-run: `ray symmetric-run`, which comes with Ray.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common import in_turns, median, median_ratio, publish, table
from tests.sandbox.cluster import Cluster

TIMEOUT_S = 400
DRIVER = """
import pathlib, sys, time, ray
ray.init(address=sys.argv[3], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(0.05)
pathlib.Path(sys.argv[2], "connected").write_text(str(time.time()))
"""
BARE = "{ray} start --head --port=6400 --include-dashboard=false"
SLEEPING = """
if [ "$SLURM_NODEID" = 0 ]; then
  {ray} start --head --node-ip-address="$(hostname -i)" --port=6400 &
  sleep $((10 + 5 * ({nodes} - 1)))
  wait
  {python} {driver} {nodes} {folder} {head}
else
  sleep $((10 + 5 * (SLURM_NODEID - 1)))
  timeout 300 {ray} start --address={head} --block || true
fi
"""
SYMMETRIC = "{ray} symmetric-run --address {head} --min-nodes {nodes} -- {python} {driver} {nodes} {folder} {head}"
OURS = (
    "{python} -P -m hpc_rl.node.ray_cluster.node --processes 1 --device cpu -- {python} {driver} {nodes} {folder} auto"
)


class Measurement:
    """One variant with one number of nodes."""

    def __init__(self, cluster: Cluster, nodes: int, body: str, needs_driver: bool) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._body = body
        self._needs_driver = needs_driver
        self._numbers = itertools.count()

    def __call__(self) -> float:
        """Return the seconds from the first task's start until the driver is connected, or the last bare start ends."""
        folder = self._cluster.shared / f"up-{self._nodes}-{abs(hash(self._body)) % 10**6}-{next(self._numbers)}"
        attempt = folder / "attempt-1"
        attempt.mkdir(parents=True)
        driver = folder / "driver.py"
        driver.write_text(DRIVER)
        words = {
            "python": sys.executable,
            "ray": str(Path(sys.executable).with_name("ray")),
            "driver": driver,
            "folder": folder,
            "nodes": self._nodes,
            "head": "node1:6400",
        }
        script = folder / "task.sh"
        script.write_text(
            "#!/bin/bash\n"
            f"date +%s.%N > {folder}/began.$SLURM_NODEID\n"
            f"{self._body.format(**words)}\n"
            f"date +%s.%N > {folder}/done.$SLURM_NODEID\n"
        )
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # symmetric-run calls `ray`
        modes = {} if self._body == OURS else {"RAY_AUTH_MODE": "disabled"}
        environ = {
            "HPC_RL_RUN_DIR": str(folder),
            "HPC_RL_ATTEMPT_DIR": str(attempt),
            "OMP_NUM_THREADS": "1",
            "PATH": path,
            **modes,
        }
        argv = ["srun", f"--nodes={self._nodes}", "--ntasks-per-node=1", "--cpus-per-task=2", "bash", str(script)]
        done = self._cluster.run(["env", *(f"{k}={v}" for k, v in environ.items()), *argv], timeout=TIMEOUT_S)
        began = min(float(path.read_text()) for path in folder.glob("began.*"))
        if self._needs_driver:
            end = folder / "connected"
            if not end.exists():
                raise RuntimeError(f"no driver connected: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            self._cluster.wait_idle()
            return float(end.read_text()) - began
        self._cluster.wait_idle()
        return max(float(path.read_text()) for path in folder.glob("done.*")) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="ray_up", help="of the file with the results (default: %(default)s)")
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    results = {}
    with Cluster(max(options.nodes), name="ray-up", cpus=2, memory_mb=8000) as cluster:
        for nodes in options.nodes:
            variants = {
                "hpc-rl": Measurement(cluster, nodes, OURS, needs_driver=True),
                "bare starts": Measurement(cluster, nodes, BARE, needs_driver=False),
                "sleeping script": Measurement(cluster, nodes, SLEEPING, needs_driver=True),
                "symmetric-run": Measurement(cluster, nodes, SYMMETRIC, needs_driver=True),
            }
            results[str(nodes)] = in_turns(variants, options.repeats)
    publish(options.name, table(["", "seconds", "hpc-rl against it"], rows_of(results)), results, ["ray"])


def rows_of(results: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for nodes, measured in results.items():
        for name, seconds in measured.items():
            title = "`ray symmetric-run`" if name == "symmetric-run" else name
            ratio = "" if name == "hpc-rl" else f"{median_ratio(measured['hpc-rl'], seconds):.2f}"
            yield [f"{nodes} nodes, {title}", f"{median(seconds):.1f}", ratio]


if __name__ == "__main__":
    main()
