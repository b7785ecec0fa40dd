"""A run of benchmarks/async_rl.py or early_columns.py: `run_ppo` with the trainer and the engine on a core each.

python -m benchmarks.async_rl_run early|late RUN_DIR key=value ...

With `late`, columns are computed after generation, although engines have GPUs of their own
(hpc_rl/rl/loop/computed.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray

from benchmarks.common import pin
from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.main_ppo import TaskRunner, run_ppo
from hpc_rl.run_dir import RunDir

TIMEOUT_S = 600


class PinnedRunner(TaskRunner):
    """The driver, which may use all cores."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        from hpc_rl.rl.loop import setup

        set_up = setup.set_up

        def set_up_pinned(*arguments: Any) -> Any:
            state = set_up(*arguments)
            actors = [*state.actor._workers, *state.rollout._engines.actors]  # type: ignore[attr-defined]
            for core, actor in zip(sorted(os.sched_getaffinity(0)), actors, strict=False):
                pin(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S), core)
            return state

        setup.set_up = set_up_pinned
        return super().run(config, run, logs)


class LateRunner(PinnedRunner):
    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        from hpc_rl.rl.loop import setup

        computation = setup.Computation
        setup.Computation = lambda *rest, is_early, **named: computation(*rest, **named)  # type: ignore[assignment,misc]
        return super().run(config, run, logs)


RUNNERS = {"early": PinnedRunner, "late": LateRunner}


def main(runner: str, folder: str, *overrides: str) -> int:
    config = compose("ppo", overrides)
    assert isinstance(config, PpoConfig)
    run = Path(folder)
    run.mkdir(mode=0o700)
    return run_ppo(config, RUNNERS[runner], RunDir(run))


if __name__ == "__main__":
    # Ray finds a class by the name of its module, which is not __main__ in its processes.
    from benchmarks.async_rl_run import main as run_main

    sys.exit(run_main(*sys.argv[1:]))
