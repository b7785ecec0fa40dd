"""Layers that mix tokens with a state, in packed rows: linear attention, state-space layers, short convolutions.

A mixer computes one sample of the row after the other, so that its state never meets another sample. It runs as
transformers runs it on a sample alone, with the kernels that are installed, and needs none that take boundaries. The
rest of a layer computes the whole row.
"""

from __future__ import annotations

from functools import cache
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

    config_of_model: PretrainedConfig
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


class GivesSamples(nn.Module):
    """What makes a layer give the samples of its row to its mixers; the class of a layer derives from it.

    Not every layer passes its arguments on to its mixer. If a layer is recomputed, transformers since 5.20 calls this
    method again, and no hook.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the layer.

        Raises:
            UserError: the model does not pass the samples on to its layers.
        """
        mixers = [part for part in self.modules() if isinstance(part, PerSample)]
        bounds, config = named.get("packed_bounds"), mixers[0].config_of_model
        if bounds is None and config._attn_implementation == ATTENTION:
            raise UserError(
                f"models of type {config.model_type} do not pass the samples' lengths to their layers, which packing "
                "needs: use another model"
            )
        assert bounds is None or bounds.sequence.size == 1  # model_kind.refuse_unsplittable
        for mixer in mixers:
            mixer.bounds = bounds
        return super().forward(*inputs, **named)


def mixers_of(module: nn.Module, config: PretrainedConfig) -> list[nn.Module]:
    """Return the mixers with a state in a module, of a model with this configuration of its text part."""
    name = MIXERS.get(config.model_type)
    return [part for part in module.modules() if type(part).__name__ == name]


def split_mixers(hf: PreTrainedModel) -> None:
    """Let the mixers of a model compute sample by sample."""
    config = hf.config.get_text_config()
    for layer in blocks_of(hf):
        for mixer in (mixers := mixers_of(layer, config)):
            _derive(mixer, PerSample)
            mixer.config_of_model = config
        if mixers:
            _derive(layer, GivesSamples)


def _derive(module: Any, base: type[nn.Module]) -> None:
    if not isinstance(module, base):
        module.__class__ = _derived(base, type(module))


@cache  # torch.compile would compile the layers of each class again
def _derived(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__})
