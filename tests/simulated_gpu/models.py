"""Shapes of models for simulations, and their loading without files."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from hpc_rl.rl.workers import critic, reward_model
from hpc_rl.training.models import loading, pretrained
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.parallel.distributed import World
from tests.simulated_gpu.shapes import Shape, sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REWARD_MODEL = "/reward"
"""Path at which a trained classifier is loaded."""


@contextlib.contextmanager
def loading_without_files(shape: Shape, layers: int | None = None) -> Iterator[None]:
    """Let every load of a model return an untrained one of this shape, and let all ranks agree with this one."""
    from transformers import AutoConfig

    with (
        untrained(AutoConfig.for_model(**sizes(shape, layers))),
        mock.patch.object(critic, "refuse_other_vocabulary", lambda *_: None),
        mock.patch.object(reward_model, "refuse_other_vocabulary", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def untrained(config: PretrainedConfig) -> Iterator[None]:
    """Let models have this configuration and weights of 0, and let all ranks agree with this one."""
    load = pretrained.from_pretrained

    def from_pretrained(auto: Any, path: str, what: str, *arguments: Any, **options: Any) -> Any:
        from transformers import AutoConfig

        if what != "model":
            return load(auto, path, what, *arguments, **options)
        own = copy.deepcopy(config)
        if "num_labels" in options:
            own.num_labels = options["num_labels"]
        if auto is AutoConfig:
            return own
        hf = auto.from_config(own, **{name: options[name] for name in ("dtype", "attn_implementation")})
        return hf, {"missing_keys": [] if path == REWARD_MODEL else ["score.weight"]}

    def stored_weights(model: Pretrained[Any], hf: Any) -> dict[str, None]:
        """Return the names of the weights that files would have."""
        return {
            name: None for name in loading.weights_of(hf) if model.path == REWARD_MODEL or not model.may_be_new(name)
        }

    def read(_model: Pretrained[Any], hf: Any, *_: object) -> None:
        for weight in loading.weights_of(hf).values():
            weight.zero_()

    with (
        mock.patch.object(pretrained, "from_pretrained", from_pretrained),
        mock.patch.object(Pretrained, "_refuse_quantised", lambda _: None),
        mock.patch.object(loading, "check_packing", lambda *_: None),
        mock.patch.object(loading, "stored_weights", stored_weights),
        mock.patch.object(loading, "_read", read),
        mock.patch.object(World, "together", lambda self, work: work()),
        mock.patch.object(World, "broadcast", lambda self, value: value),
        mock.patch.object(World, "any", lambda self, flag: flag),
    ):
        yield


def parameters(shape: Shape) -> int:
    """Return the number of parameters of a causal model of this shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return sum(
            p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes(shape))).parameters()
        )
