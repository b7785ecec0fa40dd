"""Checks of reinforcement learning: the product's driver takes steps on the Ray cluster of the job.

A run with an engine measures several things at once: whether the engine and the trainer agree before an update, whether
the engine has received the weights after it, and the memory that the engine gives back. Each is a line of the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.exceptions import RayError
from tensordict import TensorDict

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_dtype
from hpc_rl.errors import RunError, UserError
from hpc_rl.probes.acceptance.bench import Bench, Failed, Layout, Skip
from hpc_rl.probes.acceptance.models import LARGE
from hpc_rl.probes.acceptance.placements import Placing, placings
from hpc_rl.probes.acceptance.table import compiled_of, parallel_of, placing_of
from hpc_rl.probes.acceptance.training import speed_text
from hpc_rl.rl.actors.cluster import driver_log, run_driver
from hpc_rl.rl.actors.process import begin, quiet_libraries
from hpc_rl.rl.loop import setup, trainer
from hpc_rl.rl.loop.experience import add_advantages, add_rewards, flat
from hpc_rl.rl.loop.state import PpoState
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import read_json
from hpc_rl.training.perf import Clock

FOUND, VISIBLE = "found.json", "visible.json"
"""Files of a run directory: what a run measured, and the GPUs of this node by their names in the job."""
_VIEW = ("VISIBLE_DEVICES", "AFFINITY_MASK")
"""Ends of the names of variables that list the GPUs that a process sees."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest mean difference of the log-probabilities of engine and trainer, in nats, by the type of the engine."""
PART_OF_THE_UPDATE = 0.1
"""After an update, the difference may also be this part of the change that the update made: larger weights
round more."""
RELEASED = 0.5
"""Part of the engine's memory that it has to release when it sleeps."""
MEMORY_TIMEOUT_S = 60
SPEED_STEPS = 3


def log_probabilities(bench: Bench, engine: str) -> str:
    """Compare the log-probabilities of an engine with the trainer's, before any update."""
    placing = next(one for one in placings(bench.layout) if one.engine == engine)
    return before_update(_run(bench, placing))


def weight_transfer(bench: Bench, name: str) -> str:
    """Compare the log-probabilities of an engine with the trainer's after an update of the weights."""
    return after_update(_run(bench, placing_of(bench.layout, name)))


def sleep_and_wake(bench: Bench, _variant: str) -> str:
    """Compare the memory that is used on the first GPU while vllm is awake, asleep, and awake again."""
    placing = next(one for one in placings(bench.layout) if one.engine == "vllm" and one.shared)
    return released(_run(bench, placing))


def tensor_parallel(bench: Bench, variant: str) -> str:
    """Compare the log-probabilities of vllm on several devices with the trainer's, before and after an update."""
    return _both(_measured(bench, f"tensor-parallel-{_file_name(variant)}", _settings(bench, parallel_of, variant)))


def compiled(bench: Bench, variant: str) -> str:
    """Compare the log-probabilities of compiled engines with the trainer's. The second start loads what the first one
    has compiled, and each engine loads what the others have compiled."""
    settings = {**_settings(bench, compiled_of, variant), "rollout.engine_kwargs": {"enforce_eager": False}}
    words = []
    for start in ("first", "second"):
        found = _measured(bench, f"compiled-{_file_name(variant)}-{start}", settings)
        try:
            words.append(f"{start} start in {found['start_s']:.0f} s: {_both(found)}")
        except Failed as error:
            raise Failed(f"{start} start: {error}") from error
    return "; ".join(words)


def speed(bench: Bench, _variant: str) -> str:
    """Measure tokens per second and model FLOPs utilisation of a step of PPO with the default engine."""
    changes: dict[str, Any] = {"algorithm.advantage": "gae", "rollout.calculate_log_probs": False}
    if bench.large() == LARGE:
        changes |= {**bench.model_keys(LARGE), "actor.optim.lr": 1e-6, "data.max_response_length": 512}
        changes |= {"data.train_batch_size": 16 * bench.layout.size, "trainer.micro_tokens": 16_384}
        changes |= {"model.enable_gradient_checkpointing": True, "data.max_prompt_length": 512}
    found = _drive(bench, bench.ppo(changes), "ppo-speed", SpeedRunner)
    seconds = {name: found[f"timing_s/{name}"] for name in ("gen", "update_actor", "update_weights")}
    phases = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return f"{speed_text(found, 'perf/mfu/actor', bench.layout.size)}; {phases} of {found['perf/time_per_step']:.1f} s"


def _settings(bench: Bench, find: Callable[[Layout, str], Placing | None], variant: str) -> dict[str, Any]:
    """Return the configuration keys of a variant, which applies to the layout."""
    placing = find(bench.layout, variant)
    assert placing is not None
    return placing.settings(bench.layout)


def _both(found: Mapping[str, Any]) -> str:
    return f"{before_update(found)}; {after_update(found)}"


def before_update(found: Mapping[str, Any]) -> str:
    """Return in words how the first responses compare.

    Raises:
        Failed: engine and trainer disagree.
    """
    limit = TOLERANCE[found["dtype"]]
    text = f"mean difference {found['before']:.1e} nats in {found['dtype']}"
    if not found["before"] <= limit:
        raise Failed(f"{text}; at most {limit:.0e} is expected")
    return text


def after_update(found: Mapping[str, Any]) -> str:
    """Return in words how responses after an update compare.

    Raises:
        Failed: engine and trainer disagree, or the update was too small to show it.
    """
    limit = max(TOLERANCE[found["dtype"]], PART_OF_THE_UPDATE * found["moved"])
    text = f"mean difference {found['after']:.1e} nats after an update that changed {found['moved']:.1e} nats"
    if not found["after"] <= limit:
        raise Failed(f"{text}; at most {limit:.0e} is expected")
    if not found["moved"] > 2 * limit:
        raise Failed(f"{text}, which is too little to show whether the weights arrived")
    return text


def released(found: Mapping[str, Any]) -> str:
    """Return in words the memory on the first GPU, in 10^9 bytes.

    Raises:
        Failed: the engine kept most of its memory while it slept.
    """
    start, awake, asleep, again = (found["memory"][name] / 1e9 for name in ("start", "awake", "asleep", "again"))
    text = f"{awake:.1f} GB used, {asleep:.1f} GB asleep, {again:.1f} GB after waking, {start:.1f} GB before the start"
    if not awake - asleep >= RELEASED * (awake - start):
        raise Failed(text)
    return text


class AgreementRunner:
    """A driver that takes one step and generates once more, and writes how engine and trainer compare."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        """Take the step, write the comparison to FOUND, and return exit code 0."""
        visible = read_json(run.path / VISIBLE)
        start, began = used_memory(visible, config), time.monotonic()
        with _set_up(config, run, logs) as state:
            start_s = time.monotonic() - began
            found = {**agreement(state, visible), "dtype": engine_dtype(config.rollout, config.trainer.computes_on)}
        if start is not None:
            found["memory"]["start"] = start
        (run.path / FOUND).write_text(json.dumps({**found, "start_s": start_s}))
        return 0


class SpeedRunner:
    """A driver that takes some steps and writes the metrics of the fastest one."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        """Take the steps, write the metrics of the fastest one to FOUND, and return exit code 0."""
        with _set_up(config, run, logs) as state:
            steps = [_timed_step(state) for _ in range(SPEED_STEPS)]
        fastest = min(steps, key=lambda metrics: metrics["perf/time_per_step"])
        (run.path / FOUND).write_text(json.dumps(fastest))
        return 0


def agreement(state: PpoState, visible: Mapping[str, str]) -> dict[str, Any]:
    """Take one step, generate once more, and compare the log-probabilities of engine and trainer each time.

    Returns:
        before, after: mean difference in nats. moved: mean change by the update, of the first responses. memory: bytes
        that are used on the first GPU while the engine is awake, asleep, and awake again; empty on CPUs.
    """
    config = state.config
    first, memory = _generate(state, visible)
    add_rewards(first, config.algorithm, state.kl.coef)
    add_advantages(first, config.algorithm, None)
    trainer.learn(state, first, Clock())
    new_logprobs_N = state.actor.column("logprobs").wait().values()
    state.step += 1
    second, again = _generate(state, visible)
    if again:
        memory["again"] = again["awake"]
    return {
        "before": _gap(flat(first, "old_logprobs"), flat(first, "rollout_logprobs")),
        "moved": _gap(new_logprobs_N, flat(first, "old_logprobs")),
        "after": _gap(flat(second, "old_logprobs"), flat(second, "rollout_logprobs")),
        "memory": memory,
    }


def used_memory(visible: Mapping[str, str], config: PpoConfig) -> int | None:
    """Return the bytes that all processes together use on the first GPU of this node; None on CPUs.

    Another process asks, because Ray hides the GPUs from this one.
    """
    if config.trainer.computes_on == "cpu":
        return None
    code = "import torch; free, total = torch.accelerator.get_memory_info(0); print(total - free)"
    hidden = {name: value for name, value in os.environ.items() if not name.endswith(_VIEW)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env={**hidden, **visible}, capture_output=True, text=True, timeout=MEMORY_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RunError(f"the memory of GPU 0 cannot be read: {(done.stderr.splitlines() or ['no message'])[-1]}")
    return int(done.stdout.split()[-1])


def _generate(state: PpoState, visible: Mapping[str, str]) -> tuple[TensorDict, dict[str, int]]:
    """Generate a step's responses and evaluate them, as `hpc_rl.rl.loop.trainer.step` does; measure the memory."""
    memory: dict[str, int] = {}
    state.rollout.wake()
    batch = state.batches.draw(state.step, lambda: False)
    assert batch is not None  # nothing stops it
    if (used := used_memory(visible, state.config)) is not None:
        memory["awake"] = used
    state.rollout.sleep()
    if (used := used_memory(visible, state.config)) is not None:
        memory["asleep"] = used
    experience = batch.experience()
    trainer.evaluate(state, batch, experience, Clock())
    return experience, memory


def _timed_step(state: PpoState) -> dict[str, float]:
    clock = Clock()
    return {**trainer.step(state, clock), **clock.seconds}


@contextlib.contextmanager
def _set_up(config: PpoConfig, run: RunDir, logs: Path) -> Any:
    """Start the run as its driver does, and end its engines."""
    begin(driver_log(logs))
    quiet_libraries()
    state = setup.set_up(config, run, logs)
    try:
        yield state
    finally:
        state.tracker.finish(0)
        state.scoring.close()
        with contextlib.suppress(RunError):  # the measurement itself has ended
            state.rollout.close()


def _gap(found_N: torch.Tensor, expected_N: torch.Tensor) -> float:
    return float((found_N - expected_N).abs().mean())


def _run(bench: Bench, placing: Placing) -> dict[str, Any]:
    """Return the measurements of a placement, from an earlier check if there was one."""
    if placing.name not in bench.memory:
        try:
            bench.memory[placing.name] = _measured(bench, _file_name(placing.name), placing.settings(bench.layout))
        except (UserError, RayError) as error:
            bench.memory[placing.name] = error
            raise
    found = bench.memory[placing.name]
    if isinstance(found, Exception):
        raise Skip("the run that measures this failed in an earlier check") from found
    result: dict[str, Any] = found
    return result


def _file_name(words: str) -> str:
    return re.sub(r"\W+", "-", words)


def _measured(bench: Bench, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return _drive(bench, bench.ppo(settings), name, AgreementRunner)


def _drive(bench: Bench, config: PpoConfig, name: str, runner: Any) -> dict[str, Any]:
    """Run a driver in an actor and return what it wrote."""
    run = RunDir(bench.folder / name)
    run.path.mkdir(mode=0o700)
    seen = {key: value for key, value in os.environ.items() if key.endswith(_VIEW)}
    (run.path / VISIBLE).write_text(json.dumps(seen))
    _await_free_memory(bench, config, seen)
    run_driver(config, runner, run, run.path)
    found = read_json(run.path / FOUND)
    if not found:
        raise RunError(f"the driver wrote no result; its log is {driver_log(run.path)}")
    return found


def _await_free_memory(bench: Bench, config: PpoConfig, visible: Mapping[str, str]) -> None:
    """Wait until the processes of earlier checks have released their GPU memory.

    Raises:
        RunError: they still hold it at the deadline.
    """
    used = used_memory(visible, config)
    if used is None:
        return
    limit = bench.memory.setdefault("used before the first run", used) + 10**9
    deadline = time.monotonic() + MEMORY_TIMEOUT_S
    while used > limit:
        if time.monotonic() > deadline:
            raise RunError(f"{used / 1e9:.1f} GB of GPU memory are still in use after an earlier check has ended")
        time.sleep(1)
        used = used_memory(visible, config) or 0
