"""The form that weights have in a model's files, in which rollout engines load them.

When transformers 5 reads the files, it merges the experts of a layer into one tensor, and renames some weights. Engines
expect the names of the files: `mlp.experts.3.gate_proj.weight` of Qwen3-MoE, `block_sparse_moe.experts.3.w1.weight` of
Mixtral. transformers 4 has the experts as the files have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hpc_rl.training.models.loading import changes_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StoredForm:
    """How the weights of a module are named and divided in files.

    Args:
        hf: a module of transformers; its weights are not read.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf if changes_weights(hf) else None
        if self._hf is not None:
            _find_conversions_once(hf)

    @property
    def differs(self) -> bool:
        """Whether some weights have other names in files, or are merged in the module."""
        return self._hf is not None

    def parts(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and value of each tensor of a file that is in a weight of the module.

        Args:
            name: of the weight in the module.
            weight: its value, or a tensor on the meta device, for names and shapes.
        """
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # transformers 4, which only renames
            yield name, weight
            return
        for stored, part in revert_weight_conversion(self._hf, {name: weight}).items():
            yield stored, part.contiguous()


def _find_conversions_once(hf: PreTrainedModel) -> None:
    """Keep on a module the conversions of its weights, as transformers does for models that it has loaded.

    Otherwise, transformers would look through all modules again for each weight.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # transformers 4
        return
    if getattr(hf, "_weight_conversions", None) is None:
        found = get_model_conversion_mapping(hf, add_legacy=False)
        # Changes of prefixes concern names that only a model that was loaded may have had (revert_weight_conversion).
        hf._weight_conversions = [one for one in found if not isinstance(one, PrefixChange)]
