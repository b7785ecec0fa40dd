"""A Hugging Face causal language model, loaded for packed training."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn import functional

from hpc_rl.config.training.common import LoraConfig, ModelConfig, ModelSource, Sharding
from hpc_rl.errors import UserError
from hpc_rl.formats.model_families import REFUSALS, UNPACK, refuse_family
from hpc_rl.formats.model_kind import is_classifier, refuse_transformers_4
from hpc_rl.formats.model_options import refuse_option, refuse_without_liger
from hpc_rl.plan.shape import shape_of
from hpc_rl.software.installation import install_command
from hpc_rl.training.models import lora
from hpc_rl.training.models.attention.packed_attention import backbone_of, hidden_states, is_packed
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.models.compute_weights import ComputeWeights
from hpc_rl.training.models.four_bit import four_bit_weights
from hpc_rl.training.models.mixers import PerSample, mixers_of, split_mixers
from hpc_rl.training.models.pretrained import Pretrained, from_pretrained
from hpc_rl.training.models.recomputation import recompute
from hpc_rl.training.models.rotary import follow_samples
from hpc_rl.training.models.routers import Routers, find_routers
from hpc_rl.training.parallel.sequence_parallel import ALONE, SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

_ALIGNED = 8
"""Columns that a bias adds to the weight of an LM head."""
_FROZEN_FLOPS = 4.0
"""Operations per token of a parameter without gradient, forward and backward."""


class PackedModel(nn.Module):
    """A Hugging Face model that runs on packed rows."""

    sharding: Sharding = "none"
    """The division of its parameters among ranks, which sharding.shard sets."""
    compute_weights: ComputeWeights | None = None
    """The copies of float32 weights with which it computes if one GPU has the whole model; sharding.shard sets them."""
    adapters: lora.Adapters | None = None
    """The adapters that are trained instead of the whole model."""
    prepared: ModelConfig | None = None
    """The options of prepare_training; None of a model for which it was not called."""
    sequence: SequenceGroup = ALONE
    """The ranks that compute a row together, which loading.load_sharded sets."""
    routers: Routers | None = None
    """The routers of a mixture of experts that is trained."""

    def __init__(self, hf: PreTrainedModel, longest: int | None = None) -> None:
        super().__init__()
        self.hf = hf
        if hasattr(backbone := backbone_of(hf), "_rescale_layers"):
            backbone._rescale_layers = lambda: None  # RWKV would divide weights in place for each evaluation
        if hf.base_model is hf:  # transformers 4 searches Gemma 3 for a part that it does not have
            hf.base_model_prefix = "model"
        follow_samples(hf, longest)
        split_mixers(hf)

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return the hidden states of the last layer, [T, H].

        Args:
            batch: a row, or this rank's slice of it; see SequenceGroup.own.
        """
        with nullcontext() if self.routers is None else self.routers.counting(batch.tokens):
            return hidden_states(self.hf, batch, self.sequence)

    def layers(self) -> list[nn.Module]:
        """Return the transformer layers, the unit of sharding, recomputation and compilation."""
        return lora.blocks_of(self.hf)

    def float32_modules(self) -> list[nn.Module]:
        """Return modules that compute in float32 on every device: their results would suffer from bfloat16."""
        return []

    def head_name(self) -> str | None:
        """Return the name of a head that is trained as a whole even if the rest has adapters; None without one."""
        return None

    def prepare_training(self, config: ModelConfig) -> None:
        """Switch to training mode, with adapters, kernels and recomputation as configured.

        Raises:
            UserError: the model cannot have these adapters or kernels, or its layers cannot be recomputed in this way.
        """
        for name in config.restricted():
            refuse_option("model", self.hf.config.name_or_path, self.hf.config.to_dict(), name)
        if config.lora.is_used:
            self.adapters = lora.add_adapters(self.hf, config.lora, config.path)
            if (head := self.head_name()) is not None:
                self.hf.get_submodule(head).requires_grad_(True)
        self.hf.train()
        self.routers = find_routers(self.hf)
        if config.use_liger:
            use_liger(self.hf)
        recompute(self.hf, lora.text_blocks(self.hf), config)
        self.prepared = config


class CausalLM(PackedModel):
    """Backbone and LM head in one module, so that FSDP has gathered the head's weight when the loss needs it."""

    def forward(self, batch: PackedBatch, head: Callable[[torch.Tensor, torch.Tensor], T]) -> T:
        """Run the backbone on a packed row, or on this rank's slice of it, then return `head(hidden_NH, weight_VH)` of
        the positions with a target.

        Both may differ from the model's own; see head_inputs.
        """
        return head(*head_inputs(self.hf, self.hidden(batch)[batch.rows_N]))

    @property
    def softcap(self) -> float | None:
        """The cap of the logits, which functions of the LM head need; None without one."""
        return softcap_of(self.hf)


def causal_lm(
    config: ModelConfig,
    trained: bool = True,
    key: str = "model.path",
    dropout: bool = True,
    longest: int | None = None,
) -> Pretrained[CausalLM]:
    """Return the policy of a configuration, to be loaded.

    Args:
        trained: whether the model gets gradients; a reference does not.
        key: the option that names the model, for errors.
        dropout: whether a trained model keeps its dropout, and other noise of training.
        longest: see rotary.follow_samples.
    """

    def wrap(hf: PreTrainedModel, _missing: frozenset[str]) -> CausalLM:
        refuse_unsupported(hf, key, config.path)
        model = CausalLM(hf, longest)
        model.prepare_training(config if trained else config.updated("lora", LoraConfig()))
        if not dropout:
            without_noise(model)
        if not trained:
            model.requires_grad_(False).eval()
        return model

    dtype = getattr(torch, config.dtype)
    return Pretrained("AutoModelForCausalLM", config.path, key, dtype, config.trust_remote_code, wrap)


def load_model(config: ModelConfig, longest: int | None = None, packing: bool = True) -> CausalLM:
    """Load a whole model into host memory, in the type that is trained.

    Args:
        longest: see rotary.follow_samples.
        packing: whether it computes packed rows.

    Raises:
        UserError: no model can be loaded, or training cannot compute it correctly.
    """
    return replace(causal_lm(config, longest=longest), packing=packing).load()


def without_noise(model: nn.Module) -> None:
    """Compute a trained model as engines and references compute it: a token must have the same probability each time.

    In training mode, models draw random numbers for dropout, and some also for noise (`router_jitter_noise` of Mixtral)
    or for the choice of experts (Phi-3.5-MoE). Two kinds of modules need this mode, and draw nothing but dropout: those
    that recompute layers, and mixers, which have a faster kernel for it.
    """
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False) or isinstance(module, PerSample)
        for name, value in list(vars(module).items()) if module.training else ():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch off what is random in training; restore the mode of every submodule afterwards."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def load_tokenizer(config: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of tokenizer_path or, if that is null, of the model.

    Raises:
        UserError: no tokenizer can be loaded.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer_path or config.path
    return from_pretrained(AutoTokenizer, path, "tokenizer", trust_remote_code=config.trust_remote_code)


def softcap_of(hf: PreTrainedModel) -> float | None:
    """Return the cap of a model's logits (Gemma 2, RecurrentGemma, xLSTM); None without one."""
    config, names = hf.config.get_text_config(), ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    cap: float | None = next((found for name in names if (found := getattr(config, name, None)) is not None), None)
    return cap


def head_inputs(hf: PreTrainedModel, hidden_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and a weight whose product is the logits of a model, before a cap.

    A factor of the logits is applied to the hidden states: (f hidden) weight.T = f (hidden weight.T). In bfloat16 this
    rounds hidden states once more, an error 20 times smaller than that of rounded logits in transformers. The bias of
    an LM head is a further column of the weight, and the hidden states have a 1 there.
    """
    head, factor = hf.get_output_embeddings(), logit_factor_of(hf)
    hidden_NH = hidden_NH if factor == 1 else factor * hidden_NH
    if getattr(head, "bias", None) is None:
        return hidden_NH, head.weight
    zeros = (0, _ALIGNED - 1)  # kernels need rows of a multiple of 16 bytes
    ones_NX = functional.pad(hidden_NH.new_ones(len(hidden_NH), 1), zeros)
    return torch.cat([hidden_NH, ones_NX], 1), torch.cat([head.weight, functional.pad(head.bias[:, None], zeros)], 1)


def logit_factor_of(hf: PreTrainedModel) -> float:
    """Return the factor by which a model multiplies its logits: Cohere's, Falcon-H1's, HyperCLOVA X's, or one over
    Granite's or Inkling's."""
    config = hf.config.get_text_config()
    multiplied, divided = ["logit_scale", "lm_head_multiplier"], ["logits_mup_width_multiplier"]
    (multiplied if config.model_type == "hyperclovax" else divided).append("logits_scaling")
    above, below = (math.prod(getattr(config, name, None) or 1.0 for name in each) for each in (multiplied, divided))
    return float(above / below)


def refuse_unsupported(hf: PreTrainedModel, key: str, path: str) -> None:
    """Raise UserError for a model whose results would be wrong without an error.

    Args:
        key: the option that names `path`, for the error.
    """
    if is_classifier(hf.config.architectures):
        raise UserError(
            f"{path} is a classifier, such as a reward model, and a language model is needed; its LM head would be new"
        )
    refuse_unsupported_backbone(hf, key, path, with_head=True)
    if hf.get_output_embeddings() is None:
        reason, remedy, *_ = REFUSALS["head"]
        raise UserError(f"models of type {hf.config.model_type} {reason}: {remedy}")


def refuse_unsupported_backbone(hf: PreTrainedModel, key: str, path: str, with_head: bool = False) -> None:
    """Raise UserError for a model that training cannot compute in the way for which it was loaded.

    Args:
        key: the option that names `path`, for the error.
        with_head: whether its LM head is used, and not a head for scores.
    """
    settings = hf.config.to_dict()
    refuse_family(key, path, settings, with_head, is_packed(hf))
    refuse_transformers_4(key, path, settings, version("transformers"), is_packed(hf))
    config = hf.config.get_text_config()
    # Layers with a state have classes that do not declare their attention.
    if is_packed(hf) and not mixers_of(hf, config) and not getattr(hf, "_supports_attention_backend", False):
        raise UserError(
            f"models of type {config.model_type} do not accept a custom attention function, which packing needs: "
            f"{UNPACK}"
        )


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of training, forward and backward, for model FLOPs utilisation.

    6 per parameter and token, and 12 * layers * heads * head size * length per token for attention: PaLM,
    appendix B (https://arxiv.org/abs/2204.02311). Input embeddings are looked up, not multiplied, and do not count;
    the LM head counts only for target tokens, because it is computed only for them. Frozen parameters count 4, because
    they have no gradient.
    """

    per_token: float
    per_target: float
    per_squared_token: float
    windows: tuple[tuple[int, float], ...] = ()
    """The windows of attention, and the operations for each token and each token in its window."""

    def of(self, lengths: list[int], targets: int) -> float:
        """Return the operations of samples with these lengths and this number of target tokens."""
        found = self.per_token * sum(lengths) + self.per_target * targets
        found += self.per_squared_token * sum(length * length for length in lengths)
        return found + sum(each * sum(n * min(n, window) for n in lengths) for window, each in self.windows)


def count_flops(model: PackedModel) -> Flops:
    """Count the operations of a model. Only experts that compute a token count; with transformers 4, all of them."""
    hf = model.hf
    config = hf.config.get_text_config()
    output = hf.get_output_embeddings()  # a classifier has none
    looked_up = {id(part.weight) for part in hf.modules() if isinstance(part, nn.Embedding)}
    looked_up |= set() if output is None else {id(output.weight)}
    body = sum(_flops_of(p) for p in model.parameters() if id(p) not in looked_up)
    body += sum(_FROZEN_FLOPS * weight.shape.numel() for weight in four_bit_weights(hf).values())
    head = 0.0 if output is None else _flops_of(output.weight)
    try:
        shape = shape_of(config.to_dict(), "model")
    except UserError:  # its layers are not counted
        heads = getattr(config, "num_attention_heads", 0)  # a model may have only layers with a state
        head_size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        return Flops(body, head, 12.0 * config.num_hidden_layers * heads * head_size)
    experts = [layer.experts for layer in shape.layers if layer.experts]
    idle = 1 - experts[0].active / experts[0].count if experts else 0.0
    body -= idle * sum(_flops_of(p) for name, p in hf.named_parameters() if ".experts." in name and p.ndim == 3)
    windows: Counter[int] = Counter()
    for one in shape.attentions:
        windows[one.window or 0] += 6 * (one.queries + one.result)
    body += 3 * sum(layer.mixer.operations for layer in shape.layers if layer.mixer)
    whole = float(windows.pop(0, 0))
    return Flops(body, head, whole, tuple((window, float(each)) for window, each in windows.items()))


def _flops_of(parameter: torch.Tensor) -> float:
    """Return the operations of a parameter's matrix products for one token."""
    return (6.0 if parameter.requires_grad else _FROZEN_FLOPS) * parameter.numel()


def use_liger(hf: PreTrainedModel) -> None:
    """Replace what the layers of a model compute norms, rotary embeddings and gated activations with.

    Each is then one kernel of Liger in the forward and one in the backward pass, in place of several (Hsu et al. 2024,
    https://arxiv.org/abs/2410.10989). Weights and their names stay as they are. Liger replaces the function of the
    rotary embedding in the model's source, so that other models of this type in the process use it too. The classes
    that it replaces there are restored, because its MLP has no biases.

    Raises:
        UserError: Liger is not installed, or its kernels do not compute what this model does.
    """
    settings = hf.config.get_text_config()
    refuse_without_liger("model", hf.config.name_or_path, settings.to_dict())
    try:
        functions = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise UserError(
            f"model.use_liger=true needs liger-kernel, which cannot be imported ({error}): {install_command('liger')}"
        ) from error
    replace = functions.MODEL_TYPE_TO_APPLY_LIGER_FN[settings.model_type]
    source = sys.modules[type(hf).__module__]
    classes = {name: value for name, value in vars(source).items() if isinstance(value, type)}
    # Not its losses: the chunks of the LM head are our own (lm_head.py).
    replace(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=hf)
    vars(source).update(classes)
