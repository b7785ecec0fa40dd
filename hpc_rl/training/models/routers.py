"""How the routers of a mixture of experts distribute tokens over the experts.

    routers = find_routers(hf)                      # once; None for a model without experts
    with routers.counting(tokens): ...              # each forward pass of an update
    metrics = routers.take_metrics(world)           # after an optimizer step, on every rank

The sums over tokens are added up over micro-batches and ranks before anything is divided, so that the metrics do not
depend on how a batch was split. Shape suffixes: L layers with experts, E experts of a layer, K experts of a token, T
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_rl.training.models.pretrained import has_transformers_4
from hpc_rl.training.parallel.distributed import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FAMILIES = frozenset({"gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""model_type of models whose routers choose the largest of E logits. Probabilities are the softmax of the logits."""


class Routers:
    """The routers of a model: modules that return logits [T, E], weights and numbers [T, K] of each token's experts.

    Args:
        routers: one for each layer with experts.
        coefficient: of the auxiliary loss in the model's configuration; None if it has none.
    """

    def __init__(self, routers: list[nn.Module], coefficient: float | None = None) -> None:
        self.coefficient = coefficient
        self._first = routers[0]
        self._layers = len(routers)
        # Compiled layers read the next two, and would be compiled again if they were numbers or came and went.
        self._tokens = torch.tensor(0, device="cpu")
        self._sums_L2E: torch.Tensor | None = None
        self._has_counted = False
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._note, layer))

    @contextmanager
    def counting(self, tokens: int) -> Iterator[None]:
        """Count the first tokens of the row of a forward pass with gradients. A pass without gradients is not part of
        an update; a pass that is computed again in the backward pass does not count again.

        Args:
            tokens: number of tokens of samples; those that fill up a row come after them.
        """
        if self._sums_L2E is None:
            weight_EH = self._first.get_parameter("weight")
            self._sums_L2E = torch.zeros(self._layers, 2, len(weight_EH), device=weight_EH.device)
        if torch.is_grad_enabled():
            self._tokens, self._has_counted = torch.tensor(tokens, device="cpu"), True
        try:
            yield
        finally:
            self._tokens = torch.tensor(0, device="cpu")

    def take_metrics(self, world: World) -> dict[str, float]:
        """Return the metrics of all tokens since the last call. Every rank calls this and receives the same."""
        flat = torch.empty(0, dtype=torch.float64)
        if self._has_counted and self._sums_L2E is not None:
            flat, self._has_counted = self._sums_L2E.flatten().double().cpu(), False
            self._sums_L2E.zero_()
        total = sum(row for row in world.gather_varied(flat) if len(row))
        if not isinstance(total, torch.Tensor):
            return {}
        return router_metrics(total.view(self._layers, 2, -1), self.coefficient)

    def _note(self, layer: int, _router: nn.Module, _inputs: Any, output: Any) -> None:
        """Add the tokens of a layer to the sums."""
        logits_TE, _, chosen_TK = output
        if self._sums_L2E is not None:
            _count(self._sums_L2E[layer], logits_TE.detach(), chosen_TK, self._tokens)


@torch.library.custom_op(
    "hpc_rl::count_choices",
    mutates_args=("sums_2E",),
    schema="(Tensor(a!) sums_2E, Tensor logits_TE, Tensor chosen_TK, Tensor tokens) -> ()",
)
def _count(sums_2E: torch.Tensor, logits_TE: torch.Tensor, chosen_TK: torch.Tensor, tokens: torch.Tensor) -> None:
    """Add for each expert how many of the first tokens chose it, and the sum of its probabilities."""
    probabilities_TE = logits_TE[: int(tokens)].float().softmax(dim=-1)
    chosen = chosen_TK[: int(tokens)].flatten()
    sums_2E[0].index_add_(0, chosen, probabilities_TE.new_ones(len(chosen)))
    sums_2E[1].add_(probabilities_TE.sum(dim=0))


@_count.register_fake
def _(*_: torch.Tensor) -> None: ...


def router_metrics(sums_L2E: torch.Tensor, coefficient: float | None) -> dict[str, float]:
    """Return how evenly tokens are distributed.

    With f the number of choices of an expert per token, P its mean probability and E experts, the auxiliary loss of a
    layer is coefficient * E * sum(f P): Switch Transformer, equations 4 to 6 (https://arxiv.org/abs/2101.03961), with
    several experts per token as in transformers. It is K times the coefficient if all experts are used equally.

    Args:
        sums_L2E: float64; of each expert, the number of tokens that chose it, and the sum of its probabilities.

    Returns:
        largest_load: the largest load of an expert, divided by the mean load, in the layer where this is largest: 1 to
            E / K.
        entropy: entropy of the experts' shares of the choices, divided by its maximum log E: 0 to 1, mean over the
            layers.
        aux_loss: mean over the layers; only with a coefficient.
    """
    counts_LE, sums_LE = sums_L2E.unbind(dim=1)
    experts = counts_LE.shape[1]
    share_LE = counts_LE / counts_LE.sum(dim=1, keepdim=True)
    entropy_L = -torch.special.xlogy(share_LE, share_LE).sum(dim=1)
    found = {
        "largest_load": float(experts * share_LE.max()),
        "entropy": float(entropy_L.mean()) / math.log(experts) if experts > 1 else 1.0,
    }
    if coefficient is not None:
        tokens_L1 = sums_LE.sum(dim=1, keepdim=True)  # the probabilities of a token add up to 1
        products_L = (counts_LE / tokens_L1 * sums_LE / tokens_L1).sum(dim=1)
        found["aux_loss"] = coefficient * experts * float(products_L.mean())
    return found


def find_routers(hf: PreTrainedModel) -> Routers | None:
    """Return the routers of a model, with hooks that count from now on; None for models that are not in FAMILIES, and
    for transformers 4, whose routers return other values."""
    config = hf.config.get_text_config()
    recorders = getattr(hf.base_model, "_can_record_outputs", None) or {}
    kind = getattr(recorders.get("router_logits"), "target_class", None)
    if config.model_type not in FAMILIES or kind is None or has_transformers_4():
        return None
    modules = [module for module in hf.modules() if isinstance(module, kind)]
    return Routers(modules, getattr(config, "router_aux_loss_coef", None)) if modules else None
