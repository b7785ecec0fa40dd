from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.host.model_kind import refuse_without_liger

LLAMA = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gemma2"}, r"is of type gemma2, which model\.use_liger=true does not support \(exaone4, "),
        (
            {"partial_rotary_factor": 0.75},
            r"rotates 0\.75 of each head \(partial_rotary_factor\), and model\.use_liger",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"rotates 0\.5 of each head"),
        (
            {"hidden_act": "relu"},
            r"has the activation relu \(hidden_act\), and model\.use_liger=true would compute silu",
        ),
        ({"mlp_bias": True}, r"has biases in its MLPs \(mlp_bias\), which model\.use_liger=true would leave out"),
    ],
)
def test_models_that_ligers_kernels_would_change_are_refused(settings: dict[str, Any], message: str) -> None:
    for given in ({**LLAMA, **settings}, {"text_config": {**LLAMA, **settings}}):
        with pytest.raises(UserError, match=rf"^model\.path /m {message}.*: remove model\.use_liger, or use another"):
            refuse_without_liger("model.path", "/m", given)


def test_models_that_ligers_kernels_compute_are_accepted() -> None:
    refuse_without_liger("model.path", "/m", LLAMA)
    rotary = {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}, "rope_scaling": None}
    refuse_without_liger("model.path", "/m", {"model_type": "phi3", "partial_rotary_factor": 1.0, **rotary})
    refuse_without_liger("model.path", "/m", {**LLAMA, "hidden_act": "swish"})
