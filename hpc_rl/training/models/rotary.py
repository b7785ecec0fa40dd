"""Rotary embeddings whose frequencies depend on a length (`dynamic`, `longrope`), for each sample of a packed row.

transformers takes the largest position of a forward pass for the length. In a packed row, the longest sample would
decide for its neighbours. `dynamic` also keeps the frequencies of the longest sample so far. Here every token has the
frequencies of its own sample, or, if the policy generates too, those of one length for all samples: an engine cannot
change the frequencies while a response grows, because the keys in its cache have them already.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpc_rl.errors import UserError
from hpc_rl.formats.model_families import UNPACK
from hpc_rl.formats.model_kind import unscaled_positions
from hpc_rl.training.models.attention.packed_attention import backbone_of, is_packed
from hpc_rl.training.models.lora import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hpc_rl.training.models.attention.packed_attention import SampleBounds


def follow_samples(hf: PreTrainedModel, longest: int | None = None) -> None:
    """Let the rotary embeddings of a model depend on the samples of a row. Others stay as they are.

    Args:
        longest: the length that decides for all samples; None for the length of each.

    Raises:
        UserError: the layers compute the embedding themselves, and would compute it again in the backward pass. With
            one sample per row, they follow it without help.
    """
    modules = [module for module in hf.modules() if _depends_on_length(module)]
    if any(module in modules for block in blocks_of(hf) for module in block.modules()):
        if longest is None and not is_packed(hf):
            return
        raise UserError(
            f"models of type {hf.config.model_type} compute their rotary embeddings in each layer, and these depend on "
            f"the length of a sample, which packed training does not support: {UNPACK}; or use another model"
        )
    if not modules:
        return
    lengths = _Lengths(longest, unscaled_positions(hf.config.to_dict()))
    backbone_of(hf).register_forward_pre_hook(lengths.note, with_kwargs=True)
    for module in modules:
        module.register_forward_hook(lengths.embed, with_kwargs=True)


def _depends_on_length(module: nn.Module) -> bool:
    found = getattr(module, "rope_type", None)
    types = found.values() if isinstance(found, dict) else [found]
    return any("dynamic" in str(each) or each == "longrope" for each in types)


class _Lengths:
    """The lengths of the samples in a model's current forward pass.

    Args:
        longest: see follow_samples.
        unscaled: samples of up to so many tokens have the same frequencies.
    """

    def __init__(self, longest: int | None, unscaled: int) -> None:
        self._longest = longest
        self._unscaled = unscaled
        self._bounds: SampleBounds | None = None

    def note(self, _base: nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
        """Take the samples from the arguments of a forward pass; without them, it has one."""
        self._bounds = options.get("packed_bounds")
        assert self._longest is not None or options.get("attend") is None, "an engine needs the length of all samples"

    def embed(self, module: nn.Module, inputs: Any, options: dict[str, Any], _output: Any) -> Any:
        """Return what the module computes of each length's tokens, in their order.

        The module takes the length from a position that is added to them, and position 0 alone makes it forget others.
        """
        arguments = inspect.signature(module.forward).bind(*inputs, **options).arguments
        positions = arguments.pop("position_ids")
        places, parts = [], []
        for length, place in self._groups(positions):
            for name in [name for name in vars(module) if name.endswith("_long_inv_freq")]:
                delattr(module, name)  # transformers up to 5.19 fails if a type of layers has it already
            module.forward(**arguments, position_ids=torch.zeros_like(positions[..., :1]))
            last = torch.full_like(positions[..., :1], length - 1)
            shown = torch.cat([positions if place is None else positions[..., place], last], dim=-1)
            found = module.forward(**arguments, position_ids=shown)
            parts.append([x[..., :-1, :] for x in ((found,) if isinstance(found, torch.Tensor) else found)])
            places.append(place)
        whole = parts[0]
        if len(parts) > 1:
            order = torch.cat(places).argsort()
            whole = [torch.cat(each, dim=-2).index_select(-2, order) for each in zip(*parts, strict=True)]
        return whole[0] if isinstance(_output, torch.Tensor) else tuple(whole)

    def _groups(self, positions: torch.Tensor) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Yield each length that decides, with the places of its tokens in the row or slice; None for all places."""
        tokens, bounds = positions.shape[-1], self._bounds
        if self._longest is not None:
            yield self._longest, None
        elif bounds is None:
            yield int(positions.max()) + 1, None
        else:
            first = bounds.sequence.index * tokens
            length_T = np.repeat(bounds.lengths, bounds.lengths)[first : first + tokens].clip(min=self._unscaled)
            lengths = np.unique(length_T).tolist()
            for length in lengths:
                place = torch.from_numpy(np.flatnonzero(length_T == length)).to(positions.device)
                yield length, place if len(lengths) > 1 else None
