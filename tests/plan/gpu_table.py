"""The table of docs/plan.md: how many GPUs a method needs, as the plan finds it.

python -m tests.plan.gpu_table prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_rl.config.compose import compose
from hpc_rl.plan.advice import advise
from hpc_rl.plan.plan import fits
from hpc_rl.plan.shape import Shape, shape_of
from tests.simulated_gpu import shapes as simulated

GPUS = (80, 40, 24)
"""Memory of the GPUs of a column's three numbers, in 10^9 bytes."""
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of GPUs that are tried: parts of a node with 8, and several nodes."""
SIZES: tuple[simulated.Shape, ...] = ("0.5B", "1.5B", "7B", "14B", "32B")
TRAINED = ("data.train_files=x.jsonl", "model.enable_gradient_checkpointing=true", "trainer.micro_tokens=8192")
RL = (*TRAINED, "reward.function=exact", "data.max_prompt_length=1024", "data.max_response_length=3072")
GRPO = ("algorithm.advantage=grpo", "rollout.n=8", "algorithm.kl.where=loss", "algorithm.kl.estimator=k3")
METHODS: dict[str, tuple[str, ...]] = {
    "SFT": ("sft", *TRAINED, "data.max_length=4096"),
    "SFT, adapters": ("sft", *TRAINED, "data.max_length=4096", "model.lora.rank=32", "model.dtype=bfloat16"),
    "DPO": ("dpo", *TRAINED, "data.max_length=4096"),
    "GRPO": ("ppo", *RL, *GRPO),
    "GRPO, adapters": ("ppo", *RL, *GRPO, "model.lora.rank=32", "model.dtype=bfloat16"),
    "PPO": ("ppo", *RL, "algorithm.kl.where=reward"),
}
"""Column -> kind and options. Batches are large, so that micro-batches are full."""


def table() -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [f"| model | {' | '.join(METHODS)} |", f"| --- |{' --- |' * len(METHODS)}"]
    for name in SIZES:
        shape = shape_of(simulated.sizes(name), name)
        cells = [" / ".join(_fewest(shape, words, gpu) for gpu in GPUS) for words in METHODS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _fewest(shape: Shape, words: Sequence[str], gpu_gb: int) -> str:
    kind, *options = words
    config: Any = compose(kind, ["model.path=/model", "trainer.device=cuda", "data.train_batch_size=4096", *options])
    shapes = {"/model": shape}
    for count in COUNTS:
        own = config.updated("trainer.n_gpus_per_node", min(8, count)).updated("trainer.nnodes", -(-count // 8))
        found = fits(own, shapes, gpu_gb * 1e9) or advise(own, shapes, gpu_gb * 1e9, change_training=False) is not None
        if found:
            return str(count)
    return "-"


if __name__ == "__main__":
    print("\n".join(table()))
