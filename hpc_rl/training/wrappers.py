"""Wrappers: models that contain a language model beside parts that read images or sound.

Only the language model is built, loaded and trained, under the names that it has in the wrapper. What the files have
beside it stays there until an export copies it (checkpoints/left_out.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LANGUAGE = r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?"
"""Beginning of the names of a language model's weights in the files of a wrapper."""
OF_LANGUAGE = {f"^{LANGUAGE}": "model."}
"""How these names become those of a model that is no wrapper: pattern -> replacement."""


def wrapper_class(config: PretrainedConfig) -> Any:
    """Return transformers' class of a wrapper; None for a model that is no wrapper."""
    from transformers.models.auto import modeling_auto

    if config.get_text_config() is config or config.is_encoder_decoder:
        return None
    tables = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
    found = [table[type(config)] for name in tables if type(config) in (table := getattr(modeling_auto, name, {}))]
    named = config.architectures or [kind.__name__ for kind in found]
    return next((kind for kind in found if kind.__name__ in named), None)


def is_cut(hf: nn.Module) -> bool:
    """Return whether a module is the language model of a wrapper, and has the wrapper's class and configuration."""
    return hasattr(hf, "language_name")


@cache  # torch.compile would compile the layers of each class again
def language_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class of a wrapper that builds its language model and LM head only. Names, class name and configuration
    are those of the wrapper, and the backbone is that of the language model.

    Raises:
        UserError: when it builds a wrapper whose language model has another structure.
    """

    def build(self: Any, config: PretrainedConfig, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        name = next((name for name, module in self.named_modules() if module is decoder), "")
        if not name or head is None or self.get_input_embeddings() not in list(decoder.modules()):
            raise UserError(f"models of type {config.model_type} have no language model that can be trained alone")
        _keep_only(self, {decoder, head})
        self.language_name = name
        other = rf"^(?!{name.replace('.', chr(92) + '.')}\.)"
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), other}

    def backbone(self: Any) -> nn.Module:
        found: nn.Module = self.get_submodule(self.language_name) if is_cut(self) else kind.base_model.fget(self)
        return found

    def from_config(cls: Any, config: PretrainedConfig, trust_remote_code: bool = False, **options: Any) -> Any:
        return cls._from_config(config, **options)  # as transformers' auto classes

    def set_attention(self: Any, name: str) -> None:
        inner = self.config.get_text_config()
        of_language = [key for key in self.config.sub_configs if getattr(self.config, key, None) is inner]
        kind.set_attn_implementation(self, dict.fromkeys(("", *of_language), name))  # others would cause warnings

    own: dict[str, Any] = {"__init__": build, "__module__": kind.__module__, "base_model": property(backbone)}
    own |= {"from_config": classmethod(from_config), "set_attn_implementation": set_attention}
    return type(kind.__name__, (kind,), own)


def _keep_only(module: nn.Module, kept: set[nn.Module]) -> None:
    """Remove all modules and parameters that neither are, belong to, nor contain those to keep."""
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        delattr(module, name)
        module.__dict__[name] = torch.empty(0)  # for transformers' code that gives it a first value
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            delattr(module, name)
        else:
            _keep_only(child, kept)


def language_config(config: PretrainedConfig, settings: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration of a wrapper's language model alone, for a model with scores, which is no wrapper."""
    inner = config.get_text_config()
    inner.name_or_path = config.name_or_path
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if getattr(inner, name, None) is None:
            setattr(inner, name, getattr(config, name, None))
    for name, value in settings.items():
        setattr(inner, name, value)
    return inner
