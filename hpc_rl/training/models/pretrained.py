"""A Hugging Face model before its weights are loaded: which class, from where, in which type.

pretrained = Pretrained("AutoModelForCausalLM", config.path, ...)
pretrained.load()    the model with all weights in host memory, as transformers loads it
pretrained.empty()   the same model, whose parameters have no memory yet (loading.py fills each rank's part)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpc_rl.errors import UserError
from hpc_rl.host.hub import check_hub, loading_problem
from hpc_rl.training.models import packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model")


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
        packed_attention.register()
        hf, info = from_pretrained(
            self._auto_class(),
            self.path,
            "model",
            self.key,
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            attn_implementation=packed_attention.ATTENTION,
            output_loading_info=True,
            **self.settings,
        )
        missing = frozenset(info["missing_keys"])
        for name in missing:
            if self.may_be_new(name):
                nn.init.zeros_(hf.get_parameter(name))
        return hf, missing

    def empty(self) -> PreTrainedModel:
        """Build the module with parameters on the meta device. Buffers have their values, in host memory.

        Raises:
            UserError: there is no configuration of a model.
        """
        from transformers import AutoConfig, GenerationConfig

        packed_attention.register()
        remote = {"trust_remote_code": self.trust_remote_code}
        config = from_pretrained(AutoConfig, self.path, "model", self.key, **remote, **self.settings)
        with parameters_on_meta(), _in_one_line("model", self.path, self.key):
            hf: PreTrainedModel = self._auto_class().from_config(
                config, dtype=self.dtype, attn_implementation=packed_attention.ATTENTION, **remote
            )
        if hf.can_generate():
            with suppress(OSError):  # the model may have no such file; hf has the settings of its configuration
                hf.generation_config = GenerationConfig.from_pretrained(self.path)
        hf.eval()  # as from_pretrained returns it
        return hf

    def may_be_new(self, name: str) -> bool:
        """Return whether a weight may be missing."""
        return bool(self.new_head) and name.startswith(self.new_head + ".")

    def _auto_class(self) -> Any:
        import transformers

        return getattr(transformers, self.auto)


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
        raise UserError(f"{key}: no {what} could be loaded from {path!r}: {loading_problem(path, error)}") from error
