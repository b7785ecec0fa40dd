"""The rendezvous and the roll call of a job on many nodes: `python -m benchmarks.scale_meeting`.

This process is node 0. The other nodes are threads of a few processes, which run what node entries run (`Rendezvous`,
`hpc_rl.node.peers.join`), over files and TCP on this machine: they record that they have started, wait for the place
of the roll call, connect, identify themselves and report that they are ready. Node 0 looks as often as a node entry.

The table shows the seconds from the creation of the attempt's folder until all nodes have reported to node 0, the
processor seconds of node 0 in this time, the part of a core that it takes afterwards, and the seconds until the last
node has heard the exit code. The network and the shared file system of a cluster are not part of it, and all nodes
share the cores of this machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.common import publish, table
from hpc_rl.node.peers import Participant, coordinate, join
from hpc_rl.node.rendezvous import POLL_S, Rendezvous

PROCESSES, TIMEOUT_S, LOOKS = 8, 600, 100


def names_of(nodes: int) -> tuple[str, ...]:
    return tuple(f"node{rank}" for rank in range(nodes))


def parts_of(nodes: int, processes: int) -> list[range]:
    """Return the nodes of each process: all but node 0, about equally many."""
    bounds = [1 + (nodes - 1) * index // processes for index in range(processes + 1)]
    return [range(first, last) for first, last in pairwise(bounds) if last > first]


def take_part(folder: Path, nodes: int, ranks: Sequence[int]) -> None:
    """Take part as these nodes, and end when all of them have heard the exit code."""
    participants: list[Participant] = []

    def come(rank: int) -> None:
        rendezvous = Rendezvous(folder, names_of(nodes), rank)
        rendezvous.check_shared(TIMEOUT_S)
        rendezvous.arrive()
        participant = join(rendezvous, TIMEOUT_S)
        participant.report_up()
        participants.append(participant)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(participants) < len(ranks):
        raise SystemExit("a node has not met node 0")
    while any(participant.outcome is None for participant in participants):
        time.sleep(POLL_S)
        for participant in participants:
            participant.poll()
            if participant.loss is not None and participant.outcome is None:
                raise SystemExit(f"node {participant.rendezvous.node} has lost node 0: {participant.loss.how}")
    for participant in participants:
        participant.close()


def measure(nodes: int, processes: int = PROCESSES) -> dict[str, float]:
    """Let so many nodes meet, and return seconds."""
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "attempt-1"
        command = [sys.executable, "-m", "benchmarks.scale_meeting", "--nodes", str(nodes), "--part-in", str(folder)]
        others = [
            subprocess.Popen([*command, "--ranks", str(part.start), str(part.stop)], stdout=subprocess.PIPE)
            for part in parts_of(nodes, processes)
        ]
        try:
            for other in others:
                assert other.stdout is not None
                other.stdout.readline()  # it has started
            return as_node_0(folder, nodes, others)
        finally:
            for other in others:
                other.kill()
                other.wait()


def as_node_0(folder: Path, nodes: int, others: Sequence[subprocess.Popen[bytes]]) -> dict[str, float]:
    began, used = time.monotonic(), time.process_time()
    folder.mkdir()
    rendezvous = Rendezvous(folder, names_of(nodes), 0)
    rendezvous.arrive()
    peers = coordinate(rendezvous, "127.0.0.1")
    missing = rendezvous.missing()
    while missing or len(peers.up) < nodes:
        if time.monotonic() - began > TIMEOUT_S or any(other.poll() is not None for other in others):
            raise SystemExit(f"only {len(peers.up)} of {nodes} nodes have met")
        time.sleep(POLL_S)
        peers.poll()
        missing = missing and rendezvous.missing()
    found = {"all_ready_s": time.monotonic() - began, "node_0_processor_s": time.process_time() - used}
    used = time.process_time()
    for _ in range(LOOKS):
        peers.poll()
    found["node_0_processor_per_s"] = (time.process_time() - used) / LOOKS / POLL_S
    began = time.monotonic()
    peers.announce(0)
    for other in others:
        if other.wait(TIMEOUT_S):
            raise SystemExit("a node has not heard the exit code")
    found["all_have_heard_s"] = time.monotonic() - began
    peers.close()
    return found


def rows_of(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"{int(nodes):,} nodes",
            f"{found['all_ready_s']:.1f}",
            f"{found['node_0_processor_s']:.2f}",
            f"{100 * found['node_0_processor_per_s']:.1f} %",
            f"{found['all_have_heard_s']:.1f}",
        ]
        for nodes, found in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--part-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part_in is not None:
        print("started", flush=True)
        take_part(options.part_in, options.nodes[0], range(*options.ranks))
        return
    results = {str(nodes): measure(nodes) for nodes in options.nodes}
    headers = ["", "all ready, s", "node 0, processor s", "node 0 afterwards, of a core", "all have heard, s"]
    publish("scale_meeting", table(headers, rows_of(results)), results, [])


if __name__ == "__main__":
    main()
