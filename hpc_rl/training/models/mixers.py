"""Layers that mix tokens with a state, in packed rows: linear attention, state-space layers, short convolutions.

A mixer computes one sample of the row after the other, so that its state never meets another sample. It runs as
transformers runs it on a sample alone, with the kernels that are installed. If these kernels keep samples apart, which
the first row of each mixer shows, it computes whole rows. The rest of a layer computes the whole row anyway.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpc_rl.errors import UserError
from hpc_rl.formats.model_families import UNPACK
from hpc_rl.formats.model_kind import MIXERS
from hpc_rl.training.models.attention.packed_attention import ATTENTION, SampleBounds
from hpc_rl.training.models.lora import blocks_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_DELTA, _MAMBA_2 = ("causal_conv1d", "fla"), ("causal_conv1d", "mamba_ssm")
_KERNELS = {
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"), _MAMBA_2),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("causal_conv1d",)),
}
"""model_type -> the packages whose kernels take the boundaries of samples in all parts of its mixers."""
_SAME = {2: 0.05, 4: 0.005}
"""Bytes of a number -> largest relative difference of a token that rounding in one mixer and its kernels explains."""


class PerSample(nn.Module):
    """What makes a mixer compute each sample of a row by itself; the class of a mixer derives from it."""

    config_of_model: PretrainedConfig
    bounds: SampleBounds | None = None
    """Those of the row that its layer computes; None if that is a sample alone."""
    whole_rows: bool | None = None
    """Whether the kernels keep the samples of a row apart; None before the first row that has several."""

    @torch.compiler.disable  # the number of samples changes with each row
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the mixer with the row if its kernels take boundaries, otherwise with one sample after the other."""
        named.pop("packed_bounds", None)
        if self.config_of_model.model_type != "minimax":
            return self._row(inputs, named)
        # Its decays stay in float32, which its products with weights in bfloat16 do not take.
        hidden = tree_flatten((inputs, named))[0][0]
        half = hidden.dtype if hidden.dtype != torch.float32 else torch.bfloat16
        with torch.autocast(hidden.device.type, half, enabled=half == hidden.dtype):
            return self._row(inputs, named)

    def _row(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        own = super().forward
        if self.bounds is None or len(self.bounds.lengths) == 1:
            return own(*inputs, **named)
        if self.whole_rows is None:
            self.whole_rows = has_kernels(self.config_of_model.model_type) and self._keeps_samples_apart(inputs, named)
        if self.whole_rows:
            return own(*inputs, **named | self._boundaries())
        return self._sample_by_sample(inputs, named)

    def _boundaries(self) -> dict[str, torch.Tensor]:
        """Return the samples as the arguments that kernels of causal-conv1d and mamba-ssm (seq_idx, int32 [1, T]) and
        of flash-linear-attention (cu_seqlens, int32 [samples + 1]) take, under the names of transformers."""
        assert self.bounds is not None
        both = {"seq_idx": self.bounds.sample_of_token[None], "cu_seq_lens_q": self.bounds.cu_seqlens}
        takes = _parameters(type(self))
        return {name: tensor for name, tensor in both.items() if takes is None or name in takes}

    @torch.no_grad()
    def _keeps_samples_apart(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether boundaries make a row equal to its samples, and no boundaries make it differ clearly, so that
        a leak would be seen."""
        assert self.bounds is not None
        own, training, apart = super().forward, self.training, True
        for self.training in (not training, training):  # each may have kernels of its own; parts keep their dropout
            alone_TH = _output(self._sample_by_sample(inputs, named))
            limit = _SAME[alone_TH.itemsize]
            try:
                whole_TH = _output(own(*inputs, **named | self._boundaries()))
            except ValueError:  # of transformers since 5.24, if a kernel's package is there and cannot be imported
                self.training = training
                return False
            apart &= _difference(whole_TH, alone_TH) <= limit
            apart &= _difference(_output(own(*inputs, **named)), alone_TH) > 10 * limit
        return apart

    def _sample_by_sample(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the mixer with each sample's slice of everything that has tokens, and concatenate the results. A state
        at the end of a sample is left out."""
        assert self.bounds is not None
        own, lengths, (values, layout) = super().forward, self.bounds.lengths, tree_flatten((inputs, named))
        have_tokens = [isinstance(x, torch.Tensor) and x.ndim > 1 for x in values]  # [T] are positions in a cache
        split = [x.split(lengths, 1) if has else [x] * len(lengths) for x, has in zip(values, have_tokens, strict=True)]
        samples = (tree_unflatten(list(parts), layout) for parts in zip(*split, strict=True))
        found = [own(*one, **more) for one, more in samples]
        # The gated norm of Falcon-H1 removes the dimension of tokens if there is only one.
        outputs = [_output(one).reshape(1, length, -1) for one, length in zip(found, lengths, strict=True)]
        row_1TH = torch.cat(outputs, dim=1)
        return (row_1TH, *(None for _ in found[0][1:])) if isinstance(found[0], tuple) else row_1TH


@cache
def has_kernels(family: str) -> bool:
    """Return whether the packages are installed whose kernels take the boundaries of samples in such models."""
    return family in _KERNELS and all(find_spec(package) is not None for package in _KERNELS[family])


@cache
def _parameters(kind: type[PerSample]) -> frozenset[str] | None:
    """Return the names of the arguments of a mixer's own method; None if it takes any name."""
    takes = inspect.signature(kind.__mro__[2].forward).parameters
    return None if any(each.kind is each.VAR_KEYWORD for each in takes.values()) else frozenset(takes)


def _output(result: Any) -> torch.Tensor:
    """Return the hidden states, [T, H], of what a mixer returns."""
    found_1TH: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found_1TH[0]


def _difference(ours_TH: torch.Tensor, theirs_TH: torch.Tensor) -> float:
    """Return the relative difference of the token that differs most. NaN is never small."""
    ours, theirs = ours_TH.float(), theirs_TH.float()
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)).max())


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
                f"needs: {UNPACK}"
            )
        assert bounds is None or bounds.sequence.size == 1  # model_options.refuse_unsplittable
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
