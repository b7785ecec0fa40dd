"""`python -m tests.sandbox up|down|status|exec`: starts a Slurm cluster on this machine, for tests and experiments."""

import argparse
import shlex
import signal
import subprocess
import sys

from tests.sandbox import state
from tests.sandbox.cluster import Cluster, missing
from tests.sandbox.processes import SandboxError
from tests.sandbox.spec import Spec
from tests.sandbox.variants import VARIANTS


def parse(argv: list[str] | None) -> argparse.Namespace:
    default = Spec("default")
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster and leave it running")
    up.add_argument("--nodes", type=int, default=default.nodes)
    up.add_argument("--cpus", type=int, default=default.cpus, help="per node")
    up.add_argument("--gpus", type=int, default=default.gpus, help="fake GPUs per node")
    up.add_argument("--memory", type=int, default=default.memory_mb, metavar="MB", help="per node")
    up.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct works")
    up.add_argument("--variant", choices=VARIANTS, help="configuration of a site, instead of the options above")
    up.add_argument("--tree", default=default.tree, help="root directory of another Debian whose Slurm is used")
    down = commands.add_parser(
        "down", help="end a cluster and remove everything that belongs to it, including its shared directory"
    )
    down.add_argument("--all", action="store_true", help="every cluster")
    commands.add_parser("status", help="list the clusters and their nodes")
    run = commands.add_parser("exec", help="run a command on a node without Slurm")
    for command in (up, down, run):
        command.add_argument("--name", default=default.name)
    run.add_argument("node")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def up(options: argparse.Namespace) -> None:
    sizes = {"nodes": options.nodes, "cpus": options.cpus, "gpus": options.gpus, "memory_mb": options.memory}
    spec = VARIANTS[options.variant] if options.variant else {**sizes, "accounting": options.accounting}
    cluster = Cluster(name=options.name, tree=options.tree, **spec)
    cluster.up()
    cluster.detach()
    name = "" if options.name == "default" else f" --name {options.name}"
    print(f"{len(cluster.nodes)} nodes are idle. Now type:")
    if cluster.login():
        print(f"  {sys.executable} -m tests.sandbox exec{name} ctl -- bash  # a shell on the login node")
    print(f"  export SLURM_CONF={shlex.quote(cluster.env['SLURM_CONF'])}")
    print("  sinfo; srun --nodes=2 hostname")
    print(f"All nodes see {cluster.shared}; each has its own /tmp. To end it: python -m tests.sandbox down{name}")


def down(options: argparse.Namespace) -> None:
    for name in state.names() if options.all else [options.name]:
        with state.lock():
            state.remove(name)
        print(f"sandbox {name}: nothing is left")


def status() -> None:
    for name in state.names():
        if not state.in_use(name):
            print(f"{name}: remains of a killed sandbox; the next `up` removes them")
            continue
        cluster = Cluster.attach(name)
        nodes = ", ".join(f"{node} {found}" for node, found in cluster.node_states().items())
        print(f"{name}: {nodes or 'the controller does not answer'}\n  export SLURM_CONF={cluster.env['SLURM_CONF']}")
    if not state.names():
        print("no sandbox is up")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if lacking := missing(getattr(options, "accounting", False)):
        print(lacking, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, which removes an incomplete cluster
    try:
        if options.command == "up":
            up(options)
        elif options.command == "down":
            down(options)
        elif options.command == "status":
            status()
        else:
            argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
            cluster = Cluster.attach(options.name)
            return cluster.exec_on(options.node, argv, timeout=None, capture_output=False, stdin=None).returncode
    except (SandboxError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
