"""Layers that mix tokens with a state, in packed rows: linear attention, state-space layers, short convolutions.

A mixer computes one sample of the row after the other, so that its state never meets another sample. It runs as
transformers runs it on a sample alone, with the kernels that are installed, and needs none that take boundaries. The
rest of a layer computes the whole row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import MIXERS
from hpc_rl.training.models.attention.packed_attention import ATTENTION, SampleBounds
from hpc_rl.training.models.lora import blocks_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class PerSample(nn.Module):
    """What makes a mixer compute each sample of a row by itself; the class of a mixer derives from it."""

    bounds: SampleBounds | None = None
    """Those of the row that its layer computes; None if that is a sample alone."""

    @torch.compiler.disable  # the number of samples changes with each row
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the mixer with each sample's slice of everything that has tokens, and concatenate the results. A state
        at the end of a sample is left out."""
        own = super().forward
        if self.bounds is None:
            return own(*inputs, **named)
        named.pop("packed_bounds", None)
        lengths, (values, layout) = self.bounds.lengths, tree_flatten((inputs, named))
        have_tokens = [isinstance(x, torch.Tensor) and x.ndim > 1 for x in values]  # [T] are positions in a cache
        split = [x.split(lengths, 1) if has else [x] * len(lengths) for x, has in zip(values, have_tokens, strict=True)]
        samples = (tree_unflatten(list(parts), layout) for parts in zip(*split, strict=True))
        found = [own(*one, **more) for one, more in samples]
        if isinstance(found[0], tuple):
            return torch.cat([first for first, *_ in found], dim=1), *(None for _ in found[0][1:])
        return torch.cat(found, dim=1)


def mixers_of(module: nn.Module, config: PretrainedConfig) -> list[nn.Module]:
    """Return the mixers with a state in a module, of a model with this configuration of its text part."""
    name = MIXERS.get(config.model_type)
    return [part for part in module.modules() if type(part).__name__ == name]


def split_mixers(hf: PreTrainedModel) -> None:
    """Let the mixers of a model compute sample by sample.

    Not every layer passes its arguments on to its mixer. The layer receives the samples with each forward pass, and
    again if it is recomputed, and gives them to its mixer.
    """
    config = hf.config.get_text_config()
    for layer in blocks_of(hf):
        mixers = mixers_of(layer, config)
        for mixer in mixers:
            if not isinstance(mixer, PerSample):
                mixer.__class__ = _per_sample(type(mixer))
        if mixers:
            layer.register_forward_pre_hook(partial(_tell, mixers, config), with_kwargs=True)


@cache  # torch.compile would compile the layers of each class again
def _per_sample(kind: type[nn.Module]) -> type[PerSample]:
    return type(kind.__name__, (PerSample, kind), {"__module__": kind.__module__})


def _tell(
    mixers: Sequence[PerSample], config: PretrainedConfig, _layer: nn.Module, _inputs: Any, named: Mapping[str, Any]
) -> None:
    """Give the samples of a layer's row to its mixers.

    Raises:
        UserError: the model does not pass them on to its layers.
    """
    bounds = named.get("packed_bounds")
    if bounds is None and config._attn_implementation == ATTENTION:
        raise UserError(
            f"models of type {config.model_type} do not pass the samples' lengths to their layers, which packing "
            "needs: use another model"
        )
    assert bounds is None or bounds.sequence.size == 1  # model_kind.refuse_unsplittable
    for mixer in mixers:
        mixer.bounds = bounds
