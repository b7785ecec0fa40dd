"""hpc-rl in benchmarks/ppo.py: an ordinary `run_ppo`, with a driver that waits for its turn between steps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.ppo_turns import Pace
from benchmarks.ppo_workload import (
    CLIP_GRAD,
    CLIP_VALUE,
    DATA,
    KL_COEF,
    LR,
    POLICY,
    PROMPTS,
    RESPONSE_TOKENS,
    REWARD_MODEL,
    SAMPLES,
    Algorithm,
)
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.main_ppo import TaskRunner, run_ppo
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker

WARM_UP, MANY = 2, 10**6


class PacedTracker:
    """The tracker of the run; a step ends when its metrics are written."""

    def __init__(self, tracker: Tracker, run: RunDir) -> None:
        self._tracker = tracker
        self._run = run
        self._pace = Pace(WARM_UP)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tracker, name)

    def log(self, step: int, metrics: Mapping[str, float], total_steps: int) -> None:
        self._tracker.log(step, metrics, total_steps)
        prefix = "timing_s/"
        phases = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if phases and not self._pace.step_done(phases):
            self._run.stop.touch()


class PacedRunner(TaskRunner):
    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        from hpc_rl.rl.loop import setup

        set_up = setup.set_up

        def set_up_paced(*arguments: object) -> object:
            state = set_up(*arguments)  # type: ignore[arg-type]
            state.tracker = PacedTracker(state.tracker, run)  # type: ignore[assignment]
            return state

        setup.set_up = set_up_paced  # type: ignore[assignment]
        return super().run(config, run, logs)


def configuration(folder: Path, algorithm: Algorithm, epochs: int) -> PpoConfig:
    optim = {"lr": LR[algorithm], "clip_grad": CLIP_GRAD[algorithm], "lr_scheduler": "constant", "warmup_ratio": 0.0}
    of_algorithm = {
        "grpo": {
            "algorithm": {"advantage": "grpo", "clip_ratio_c": None},
            "reward": {"function": "benchmarks.ppo_workload:score", "workers": 1},
        },
        "ppo": {
            "algorithm": {"clip_ratio_c": None, "kl": {"where": "reward", "coef": KL_COEF}},
            "critic": {"path": str(folder / REWARD_MODEL), "optim": optim, "cliprange_value": CLIP_VALUE},
            "reward": {"model": str(folder / REWARD_MODEL)},
        },
    }
    return PpoConfig.model_validate(
        {
            "model": {"path": str(folder / POLICY)},
            "data": {
                "train_files": [str(folder / DATA)],
                "prompt_key": "prompt",
                "answer_key": None,
                "max_response_length": RESPONSE_TOKENS,
                "train_batch_size": PROMPTS[algorithm],
            },
            "actor": {"optim": optim, "ppo_epochs": epochs},
            "rollout": {"n": SAMPLES[algorithm]},
            "trainer": {
                "device": "cpu",
                "total_training_steps": MANY,
                "save_minutes": 0,
                "export": False,
                "logger": [],
            },
            **of_algorithm[algorithm],
        }
    )


def main(folder: str, algorithm: Algorithm, epochs: str) -> int:
    config = configuration(Path(folder), algorithm, int(epochs))
    run = Path(folder) / "run"
    run.mkdir(mode=0o700)
    run_ppo(config, PacedRunner, RunDir(run))
    return 0


if __name__ == "__main__":
    # Ray finds a class by the name of its module, which is not __main__ in its processes.
    from benchmarks.ppo_ours import main as run_main

    sys.exit(run_main(*sys.argv[1:]))  # type: ignore[arg-type]
