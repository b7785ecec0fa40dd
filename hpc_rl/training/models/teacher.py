"""A frozen teacher for distillation: a causal language model with the tokenizer of the model that is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.vocabulary import ROLES, other_special_tokens, role_difference
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, load_tokenizer
from hpc_rl.training.models.pretrained import Pretrained, from_pretrained
from hpc_rl.training.models.scalar_model import refuse_other_vocabulary

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

KEY = "teacher.path"


def teacher_model(path: str, student: ModelConfig, on_accelerator: bool) -> Pretrained[CausalLM]:
    """Return the teacher, to be loaded without gradients."""
    settings = student.model_copy(update={"path": path, "use_liger": False})  # it may be a model of any type
    if student.use_liger:  # which replaces functions of all models of a type
        settings = settings.updated("use_torch_compile", False)
    if on_accelerator:  # which computes in bfloat16; no optimizer needs more digits of these weights
        settings = settings.updated("dtype", "bfloat16")
    return causal_lm(settings, trained=False, key=KEY)


def common_outputs(path: str, student: ModelConfig) -> int:
    """Return the number of tokens, from 0 on, for which teacher and student have an output. It can exceed the size of
    the tokenizer: models of one family pad their heads to different sizes.

    Raises:
        UserError: the two have different tokenizers, or one has too few outputs.
    """
    refuse_other_tokenizer(path, student)
    found = {KEY: _outputs(KEY, path, student), "model.path": _outputs("model.path", student.path, student)}
    needed = max(load_tokenizer(student).get_vocab().values()) + 1
    key = min(found, key=lambda key: found[key])
    if found[key] < needed:
        raise UserError(
            f"{key} {path if key == KEY else student.path} has {found[key]:,} outputs, but the tokenizer has "
            f"{needed:,} tokens: choose another model"
        )
    return found[key]


def refuse_other_tokenizer(path: str, student: ModelConfig) -> None:
    """Raise UserError if a teacher would read or write texts as other tokens than the model that is trained."""
    refuse_other_vocabulary(KEY, path, student)
    theirs = load_tokenizer(student.model_copy(update={"path": path, "tokenizer_path": None}))
    if (found := role_difference(_roles(theirs), _roles(load_tokenizer(student)))) is not None:
        raise UserError(other_special_tokens(KEY, path, student.path, found))


def _outputs(key: str, path: str, student: ModelConfig) -> int:
    return int(_settings(key, path, student).vocab_size)


def _settings(key: str, path: str, student: ModelConfig) -> PretrainedConfig:
    """Return the configuration of a language model."""
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, path, "model", key, trust_remote_code=student.trust_remote_code)
    found: PretrainedConfig = config.get_text_config()
    return found


def _roles(tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    return {role: getattr(tokenizer, role, None) for role in ROLES}
