"""Layers that compute norms, rotary embeddings and gated activations with the kernels of Liger.

Each is one kernel in the forward and one in the backward pass, in place of the several that transformers' code launches
(Hsu et al. 2024, https://arxiv.org/abs/2410.10989). The functions that put them into transformers' models are Liger's:
https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import refuse_without_liger
from hpc_rl.software.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_liger(hf: PreTrainedModel) -> None:
    """Replace what the layers of a model compute with. Weights and their names stay as they are.

    Liger replaces the function of the rotary embedding in the model's source, so that other models of this type in the
    process use it too. The classes that it replaces there are restored, because its MLP has no biases.

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
