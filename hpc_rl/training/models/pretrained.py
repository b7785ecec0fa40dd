"""A Hugging Face model before its weights are loaded: which class, from where, in which type.

pretrained = Pretrained("AutoModelForCausalLM", config.path, ...)
pretrained.load()    the model with all weights in host memory, as transformers loads it
pretrained.empty()   the same model, whose parameters have no memory yet (loading.py fills each rank's part)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpc_rl.errors import UserError
from hpc_rl.formats.hub import check_hub, loading_problem
from hpc_rl.formats.model_kind import is_classifier, refuse_quantised
from hpc_rl.formats.safetensors_header import read_header
from hpc_rl.training.models.attention import packed_attention
from hpc_rl.training.models.stored_form import follow_files
from hpc_rl.training.wrappers import (
    LANGUAGE,
    OF_LANGUAGE,
    is_cut,
    language_class,
    language_config,
    wrapper_class,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model")
_LAYER = re.compile(rf"({LANGUAGE}|model\.)layers\.(\d+)\.")
_UNUSED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)mtp[._]"
    r"|(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)
"""Names of weights that a language model does not need."""
_COMPUTED = re.compile(r"(inv_freq|position_ids|\.masked_bias|\.(attn|attention)\.bias)$")
"""Names of buffers in files of older models, which are computed today."""


@dataclass(frozen=True)
class Pretrained(Generic[Model]):
    """A model that can be loaded."""

    auto: str
    """Name of one of transformers' auto classes."""
    path: str
    """Folder, or name on the hub."""
    key: str
    """The option that names `path`, for errors."""
    dtype: torch.dtype
    trust_remote_code: bool
    wrap: Callable[[PreTrainedModel, frozenset[str]], Model]
    """Turn the loaded or empty module into the model that is trained. It receives the names of weights that were not
    found, and raises UserError for a module that cannot be used."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that replace those of the model's own configuration."""
    packing: bool = True
    """Whether the model computes packed rows, and not one sample at a time as transformers does."""
    new_head: str = ""
    """Name of a layer that the files may lack; its weights are then 0."""

    def load(self) -> Model:
        """Load the whole model into host memory.

        Raises:
            UserError: no model can be loaded, or it cannot be used.
        """
        return self.wrap(*self.load_module())

    def load_module(self) -> tuple[PreTrainedModel, frozenset[str]]:
        """Load the whole module. Return also the names of the weights that were not found."""
        self._refuse_quantised()
        packed_attention.register()
        auto, options = self._builder()
        hf, info = from_pretrained(
            auto,
            self.path,
            "model",
            self.key,
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            attn_implementation=self._attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below
            **options,
        )
        hf.of_wrapper = "key_mapping" in options
        self._follow_files(hf)
        missing = frozenset(info["missing_keys"])
        if self.new_head or not is_classifier(hf.config.architectures):  # wrap refuses a classifier
            self._refuse_other_weights(hf, info)
        for name in missing:
            if self.may_be_new(name):
                nn.init.zeros_(hf.get_parameter(name))
        return hf, missing

    def empty(self) -> PreTrainedModel:
        """Build the module with parameters on the meta device. Buffers have their values, in host memory.

        Raises:
            UserError: there is no configuration of a model.
        """
        from transformers import GenerationConfig

        self._refuse_quantised()
        packed_attention.register()
        auto, options = self._builder()
        with parameters_on_meta(), _in_one_line("model", self.path, self.key):
            hf: PreTrainedModel = auto.from_config(
                options["config"],
                dtype=self.dtype,
                attn_implementation=self._attention,
                trust_remote_code=self.trust_remote_code,
            )
        hf.config.dtype = self.dtype  # transformers 4 keeps that of the files
        if hf.can_generate():
            with suppress(OSError):  # the model may have no such file; hf has the settings of its configuration
                hf.generation_config = GenerationConfig.from_pretrained(self.path)
        hf.eval()  # as from_pretrained returns it
        self._follow_files(hf)
        return hf

    def _follow_files(self, hf: PreTrainedModel) -> None:
        """Let a language model follow its files, and note on it the weights in them that it does not have: those of the
        parts for images, or of layers that predict several tokens."""
        hf.left_out = ()
        if self.new_head:
            return
        with suppress(OSError, ValueError, KeyError):  # what reads the weights explains it
            if names := stored_names(self.path):
                own = follow_files(hf, names)
                hf.left_out = tuple(name for name in names if name not in own and not _COMPUTED.search(name))

    def may_be_new(self, name: str) -> bool:
        """Return whether a weight may be missing."""
        return bool(self.new_head) and name.startswith(self.new_head + ".")

    def is_unused(self, name: str, hf: PreTrainedModel) -> bool:
        """Return whether a stored weight is known to have no use: a computed buffer of older models, a layer that
        predicts several tokens, the part of another kind of input, or the LM head if there is a new head."""
        layer = _LAYER.match(name)
        beyond = layer is not None and int(layer[2]) >= hf.config.get_text_config().num_hidden_layers
        of_other_head = bool(self.new_head) and re.search(r"(^|\.)lm_head\.", name) is not None
        of_wrapper = is_cut(hf) and re.match(rf"{LANGUAGE}|lm_head\.", name) is None
        if getattr(hf, "of_wrapper", False):
            of_wrapper = name.removeprefix("model.").split(".")[0] not in dict(hf.base_model.named_children())
        return beyond or of_other_head or of_wrapper or _UNUSED.search(name) is not None

    def _refuse_quantised(self) -> None:
        if not Path(self.path).is_dir():
            check_hub(self.path)
        with _in_one_line("model", self.path, self.key):
            find = partial(model_file, self.path)
            refuse_quantised(self.key, self.path, find, lambda: weight_files(self.path) or ())

    def _refuse_other_weights(self, hf: PreTrainedModel, info: Mapping[str, Any]) -> None:
        """Raise UserError if a weight has no value, or another shape, or no use."""
        problems = {
            "has no": [name for name in info["missing_keys"] if not self.may_be_new(name)],
            "has weights that the model does not use:": [
                name for name in info["unexpected_keys"] if not self.is_unused(name, hf)
            ],
            "has weights of another shape than its config.json:": [
                found if isinstance(found, str) else str(found[0]) for found in info["mismatched_keys"]
            ],
        }
        for problem, names in problems.items():
            if names:
                listed = ", ".join(sorted(names)[:3]) + (f" ({len(names)} in all)" if len(names) > 3 else "")
                raise UserError(
                    f"{self.key} {self.path} {problem} {listed}: transformers reads it as {type(hf).__name__}; check "
                    "that config.json belongs to these weights, and that all of them are there"
                )

    @property
    def _attention(self) -> str | None:
        """The name of the function that computes attention; None: transformers chooses."""
        return packed_attention.ATTENTION if self.packing else None

    def _builder(self) -> tuple[Any, dict[str, Any]]:
        """Return the class that builds the module, and options of its `from_pretrained`."""
        import transformers

        auto, remote = getattr(transformers, self.auto), {"trust_remote_code": self.trust_remote_code}
        config = from_pretrained(transformers.AutoConfig, self.path, "model", self.key, **remote, **self.settings)
        wrapper = wrapper_class(config)
        if wrapper is None:
            return auto, {"config": config}
        if int(transformers.__version__.split(".")[0]) < 5:
            raise UserError(
                f"{self.key} {self.path} is a model with parts for images or sound, which is trained on text with "
                f"transformers 5, and transformers {transformers.__version__} is installed: install a newer version"
            )
        if self.new_head:
            return auto, {"config": language_config(config, self.settings), "key_mapping": OF_LANGUAGE}
        return language_class(wrapper), {"config": config}


def from_pretrained(auto: Any, path: str, what: str, key: str = "model.path", **options: Any) -> Any:
    """Call `auto.from_pretrained`.

    Args:
        what: "model" or "tokenizer", for the error.
        key: the option that names `path`, for the error.

    Raises:
        UserError: it cannot be loaded, or the hub does not answer; the message is one line.
    """
    if not Path(path).is_dir():
        check_hub(path)
    options.setdefault("trust_remote_code", False)  # without a value, transformers asks on standard input
    with _in_one_line(what, path, key):
        return auto.from_pretrained(path, **options)


def settings_of(path: str, key: str) -> dict[str, Any]:
    """Return the contents of a model's config.json.

    Raises:
        UserError: there is none, or the hub does not answer; the message is one line.
    """
    from transformers import PretrainedConfig

    if not Path(path).is_dir():
        check_hub(path)
    with _in_one_line("model", path, key):
        return dict(PretrainedConfig.get_config_dict(path)[0])


def stored_names(path: str) -> list[str]:
    """Return the names of the weights in the safetensors files of a model; empty if it has none.

    Raises:
        OSError, ValueError, KeyError: a file cannot be read.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    if (index := model_file(path, SAFE_WEIGHTS_INDEX_NAME)) is not None:
        return list(json.loads(index.read_text())["weight_map"])
    whole = model_file(path, SAFE_WEIGHTS_NAME)
    return [] if whole is None else list(read_header(whole)[0])


def weight_files(path: str, commit: str | None = None) -> list[Path] | None:
    """Return the safetensors files of a folder or of a model of the hub; None if it has none."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    whole = model_file(path, SAFE_WEIGHTS_NAME, commit)
    if whole is not None:
        return [whole]
    index = model_file(path, SAFE_WEIGHTS_INDEX_NAME, commit)
    if index is None:
        return None
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [model_file(path, name, commit) for name in names]
    absent = [name for name, file in zip(names, files, strict=True) if file is None]
    if absent:
        raise FileNotFoundError(f"{index.name} names {absent[0]}, which does not exist")
    return [file for file in files if file is not None]


def model_file(path: str, name: str, commit: str | None = None) -> Path | None:
    """Return a file of a folder, or of the hub's cache, into which it is downloaded; None if there is none.

    Args:
        commit: of the model on the hub; None for the newest.
    """
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, revision=commit, **quiet)
    return None if found is None else Path(found)


def has_transformers_4() -> bool:
    """Return whether transformers 4 is installed, which computes some models in another way."""
    from transformers import __version__

    return __version__.startswith("4.")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters have no memory. Buffers are computed as usual, because no file has them.

    The initial values of parameters are not computed, so torch's random state does not change.
    """

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied parameter is registered again, and stays the same object
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _in_one_line(what: str, path: str, key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        if packed_attention.ATTENTION in error.args:
            raise UserError(
                f"{key} {path}: this version of transformers has no custom attention function for models of this type, "
                "which packing needs: install transformers 5, or use another model"
            ) from error
        raise UserError(f"{key}: no {what} could be loaded from {path!r}: {loading_problem(path, error)}") from error
