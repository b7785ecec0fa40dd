"""Causal attention inside each sample of a packed row, for unchanged Hugging Face models.

`register()` adds one attention function to transformers' AttentionInterface under the name `ATTENTION`. A model that is
loaded with `attn_implementation=ATTENTION` and called with `attention_kwargs(batch)` computes its linear layers on the
whole row and attention sample by sample, so that no token attends to another sample and nothing is padded. Any other
model computes the samples of a row one after the other, as transformers does.

https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import attention as torch_attention
from torch.nn.functional import scaled_dot_product_attention

from hpc_rl.errors import UserError
from hpc_rl.formats.model_families import UNPACK
from hpc_rl.training.models.attention import cpu_attention, exact_attention
from hpc_rl.training.models.attention.exact_attention import SoftmaxOptions
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sequence_parallel import ALONE, SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

ATTENTION = "hpc_rl_packed"

_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()
"""Parameters of torch's varlen_attn, which depend on torch's version."""


class SampleBounds:
    """The places in a packed row where samples begin and end.

    Each layer receives this object as an argument, so that recomputation in the backward pass sees the row of its own
    forward pass, whatever other models have computed in between. The operators of attention read the samples from
    tensors, and no compiled code reads `lengths`: torch.compile would compile a layer again for each number of samples.

    Args:
        lengths: tokens of each sample.
        cu_seqlens: the start of each sample, and the end of the row: int32, [samples + 1].
        sequence: the ranks that compute the row together.
    """

    def __init__(self, lengths: tuple[int, ...], cu_seqlens: torch.Tensor, sequence: SequenceGroup = ALONE) -> None:
        self.lengths = lengths
        self.cu_seqlens = cu_seqlens
        self.sequence = sequence
        self.borders = torch.tensor([0, *accumulate(lengths)], device="cpu")
        """The numbers in `cu_seqlens`, in host memory."""
        self.longest = max(lengths)

    @cached_property
    def sample_of_token(self) -> torch.Tensor:
        """The number of each token's sample in the row: int32, [T]."""
        places_T = torch.arange(sum(self.lengths), device=self.cu_seqlens.device)
        return torch.bucketize(places_T, self.cu_seqlens[1:], right=True, out_int32=True)


class Attend(Protocol):
    """A replacement for the attention below, if the caller decides what each token attends to."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax: SoftmaxOptions,
    ) -> torch.Tensor: ...


def register() -> None:
    """Register `ATTENTION` with transformers. Models build no mask, because no mask function has that name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)


def use_flash_attention_3(world: World) -> None:
    """Let torch compute attention with FlashAttention 3 on Hopper GPUs, if this torch can and the package is installed.

    https://docs.pytorch.org/docs/stable/nn.attention.html
    """
    device = world.device
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return
    implementations = getattr(torch_attention, "list_flash_attention_impls", list)()
    if "FA3" not in implementations or importlib.util.find_spec("flash_attn_interface") is None:
        return
    if torch_attention.current_flash_attention_impl() == "FA3":
        return
    try:
        torch_attention.activate_flash_attention_impl("FA3")
        found = "attention: FlashAttention 3"
    except (ImportError, OSError, RuntimeError) as error:
        found = f"attention: torch's own FlashAttention, because flash_attn_interface cannot be used: {error}"
    if world.is_main:
        print(found, flush=True)


def is_packed(hf: PreTrainedModel) -> bool:
    """Return whether a model was loaded for packed rows. Otherwise it computes one sample at a time, as transformers
    does (trainer.packing=false)."""
    return bool(hf.config._attn_implementation == ATTENTION)


def backbone_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that computes hidden states. Llama 4 names another one as its base."""
    backbone: PreTrainedModel = hf.model if hf.base_model is hf else hf.base_model
    return backbone


def hidden_states(hf: PreTrainedModel, batch: PackedBatch, sequence: SequenceGroup = ALONE) -> torch.Tensor:
    """Return the hidden states of the last layer, [T, H].

    Args:
        batch: a whole row, or this rank's slice if several ranks compute the row together.
        sequence: these ranks.
    """
    if not is_packed(hf):
        samples = batch.input_ids_T.split(batch.lengths)
        return torch.cat([backbone_of(hf)(input_ids=ids_T[None], use_cache=False)[0][0] for ids_T in samples])
    hidden_TH: torch.Tensor = backbone_of(hf)(
        input_ids=batch.input_ids_T[None],
        position_ids=batch.position_ids_T[None],
        use_cache=False,
        **attention_kwargs(batch, sequence),
    )[0][0]
    return hidden_TH


def attention_kwargs(batch: PackedBatch, sequence: SequenceGroup = ALONE) -> dict[str, Any]:
    """Return what the forward of a model for packed rows needs besides input_ids and position_ids."""
    return {"packed_bounds": SampleBounds(batch.lengths, batch.cu_seqlens, sequence)}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_bounds: SampleBounds | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature that transformers calls.

    Args:
        query: [1, query heads, T, head size]; T are the tokens of this rank's slice if several compute the row.
        key, value: [1, key heads, T, head size]; query heads are a multiple of key heads.
        packed_bounds: the samples of the row; may be missing only if `attend` is given.
        attend: computes the result instead, from the same tensors.
        sliding_window: the number of tokens that a token attends to, counting back from itself; None for all.
        softcap: cap of the scores; None for no cap.
        s_aux: the scores of sinks, [query heads]; None for no sinks.

    Returns:
        [1, T, query heads, head size], and no attention weights.

    Raises:
        UserError: the model needs a position bias or a mask, which this function does not compute, or it does not pass
            its forward's arguments on to attention.
    """
    if attention_mask is not None or others.get("position_bias") is not None:
        name = "position_bias" if attention_mask is None else "a mask of their own"
        raise UserError(
            f"{_kind_of(module)} need {name} in attention, which packed training does not support: {UNPACK}"
        )
    softmax = SoftmaxOptions(scaling, sliding_window, softcap, s_aux)
    if attend is not None:
        return _attend_otherwise(attend, module, query, key, value, softmax), None
    if packed_bounds is None:
        raise UserError(
            f"{_kind_of(module)} do not pass the samples' lengths to attention, which packing needs: {UNPACK}"
        )
    sequence = packed_bounds.sequence
    if sequence.size > 1:
        query, key, value = sequence.to_heads(query, key, value)
        softmax = replace(softmax, sinks_H=None if s_aux is None else s_aux.chunk(sequence.size)[sequence.index])
    if softmax.needs_scores or dropout or value.shape[3] != query.shape[3]:
        attended = exact_attention.attend(query, key, value, packed_bounds.borders, softmax, dropout)
    elif query.device.type == "cpu":
        attended = cpu_attention.attend(query, key, value, packed_bounds.borders, scaling, sliding_window)
    elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and "window_size" in _VARLEN_OPTIONS:
        attended = _flash(query, key, value, packed_bounds, scaling, sliding_window)
    else:
        attended = _per_sample(query, key, value, packed_bounds, scaling, sliding_window)
    return attended if sequence.size == 1 else sequence.to_tokens(attended), None


def _kind_of(module: torch.nn.Module) -> str:
    """Name the kind of model that a layer belongs to."""
    return f"models of type {getattr(getattr(module, 'config', None), 'model_type', type(module).__name__)}"


@torch.compiler.disable  # what the caller keeps of keys and values changes with each call
def _attend_otherwise(
    attend: Attend,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: SoftmaxOptions,
) -> torch.Tensor:
    return attend(module, query, key, value, softmax)


@torch.compiler.disable  # other kernels than those above do not return what an operator's backward pass needs
def _per_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SampleBounds,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Compute attention with the kernel that torch chooses for the device and the type."""
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    # The backward pass of split is one concatenation; that of slices would write the whole row once per sample.
    for q, k, v in zip(*(x.split(bounds.lengths, dim=2) for x in (query, key, value)), strict=True):
        mask = cpu_attention.mask_of(q, window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SampleBounds,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _VARLEN_OPTIONS:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if scaling is not None:
        if "scale" in _VARLEN_OPTIONS:
            options["scale"] = scaling
        else:  # a kernel without this parameter scales by head_size ** -0.5
            q = q * (scaling * q.shape[-1] ** 0.5)
    cu_seqlens, longest = bounds.cu_seqlens, bounds.longest
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options).unsqueeze(0)
