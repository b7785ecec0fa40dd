"""The form that weights have in a model's files, in which rollout engines load them.

When transformers 5 reads the files, it merges the experts of a layer into one tensor, and renames some weights. Engines
expect the names of the files: `mlp.experts.3.gate_proj.weight` of Qwen3-MoE, `block_sparse_moe.experts.3.w1.weight` of
Mixtral. transformers 4 has the experts as the files have them. Files of one type of models may have different names:
those of a wrapper begin with `language_model.model.` or `model.language_model.`. Therefore, a module follows the files
that it was loaded from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def follow_files(hf: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Note on a module which conversions turn the weights of its files into its own, as transformers does when it loads
    them; without it, transformers does not know which of several names the files have.

    Args:
        names: of the weights in the files.

    Returns:
        Name in the files -> name in the module, if the module has such a weight.
    """
    try:
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
    except ImportError:  # transformers 4, which adds the name of the backbone
        known, prefix = hf.state_dict().keys(), f"{hf.base_model_prefix}."
        return {name: own for name in names for own in (prefix + name, name) if own in known}
    state: dict[str, Any] = hf.state_dict()
    every = _conversions(hf, add_legacy=True)
    merging = [one for one in every if isinstance(one, WeightConverter)]
    renaming = [one for one in every if not isinstance(one, WeightConverter)]
    found = {}
    for name in sorted(names, key=dot_natural_key):
        own, _ = rename_source_key(name, renaming, merging, hf.base_model_prefix, state)
        if own not in state and name in state:
            own = name
        if own in state:
            found[name] = own
    hf._weight_conversions = [one for one in every if one.was_used()]
    return found


def changes_weights(hf: PreTrainedModel) -> bool:
    """Return whether transformers renames, merges or splits weights of such models when it reads and writes them."""
    used = getattr(hf, "_weight_conversions", None)
    return bool(_conversions(hf, add_legacy=False) if used is None else used)


def only_renames(hf: PreTrainedModel) -> bool:
    """Return whether each weight of a module is one tensor of its files, under a name that follow_files returns."""
    used = getattr(hf, "_weight_conversions", None)
    return not changes_weights(hf) if used is None else not any(hasattr(one, "operations") for one in used)


def _conversions(hf: PreTrainedModel, add_legacy: bool) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4, which only renames
        return list(getattr(hf, "_checkpoint_conversion_mapping", None) or ())
    return list(get_model_conversion_mapping(hf, add_legacy=add_legacy))


class StoredForm:
    """How the weights of a module are named and divided in files.

    Args:
        hf: a module of transformers; its weights are not read.

    Raises:
        UserError: some tensors of the files are in several weights of the module.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf if changes_weights(hf) else None
        if self._hf is not None:
            _find_conversions_once(hf)
            if any(len(getattr(one, "target_patterns", ())) > 1 for one in hf._weight_conversions):
                raise UserError(
                    f"{hf.config._name_or_path}: models of type {hf.config.model_type} cannot be written weight by "
                    "weight, because transformers divides tensors of their files: set rollout.name=hf"
                )

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
            revert_weight_conversion = None
        if self._hf is None or revert_weight_conversion is None:
            yield name, weight
            return
        for stored, part in revert_weight_conversion(self._hf, {name: weight}).items():
            yield stored, part.contiguous()


def _find_conversions_once(hf: PreTrainedModel) -> None:
    """Keep on a module the conversions of its weights. Otherwise, transformers would look through all modules again for
    each weight."""
    try:
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # transformers 4
        return
    if getattr(hf, "_weight_conversions", None) is None:
        # Changes of prefixes concern names that only files may have (revert_weight_conversion).
        found = _conversions(hf, add_legacy=False)
        hf._weight_conversions = [one for one in found if not isinstance(one, PrefixChange)]
