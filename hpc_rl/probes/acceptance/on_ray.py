"""The checks on the Ray cluster: the driver of its job, python -m hpc_rl.probes.acceptance.on_ray --device cuda ...

Each check starts a driver of reinforcement learning in an actor of its own, which ends with the check.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial

from hpc_rl.probes.acceptance.bench import Bench
from hpc_rl.probes.acceptance.session import CheckSession, attempt, function_of, parse, words_of


def main(argv: Sequence[str]) -> None:
    """Run all checks that are left."""
    session = parse(argv)
    session.plan()
    run(session, Bench.here(session.layout, session.folder))


def run(session: CheckSession, bench: Bench) -> None:
    for row in session.left("ray"):
        began = time.monotonic()
        session.begin(row)
        blocked = session.blocked(row)
        try:
            outcome = ("skipped", blocked) if blocked else attempt(partial(function_of(row), bench, row.variant))
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its result; its actors end with it
            traceback.print_exc()
            outcome = ("failed", words_of(error))
        session.end(row, outcome, time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1:])
