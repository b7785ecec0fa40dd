"""The table of rollout engines, and what the configuration derives from it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.engines import ENGINES, EngineSpec, default_engine
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.rollout import RolloutConfig, engine_dtype, engine_name
from hpc_rl.errors import UserError
from hpc_rl.system.accelerators import DEVICES
from tests.rl.ppo_config import ppo_config


def functions(module: str) -> set[str]:
    """The functions of a module, which is not imported."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, f"no module {module}"
    return {node.name for node in ast.parse(Path(found.origin).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ENGINES)
def test_every_row_is_complete(name: str) -> None:
    spec = ENGINES[name]
    assert "load" in functions(spec.module)
    assert spec.dtypes.keys() <= set(DEVICES) and set(spec.dtypes.values()) <= {"float32", "bfloat16"}
    assert {*spec.default_on, *spec.exact_on, *spec.environment} <= spec.dtypes.keys()
    assert spec.transfers or name == "openai", "only an engine without weights needs no transfer"


def test_every_device_has_one_default() -> None:
    assert sorted(device for spec in ENGINES.values() for device in spec.default_on) == sorted(DEVICES)


def test_the_configuration_accepts_auto_and_the_engines_of_the_table() -> None:
    assert get_args(get_type_hints(RolloutConfig)["name"]) == ("auto", *ENGINES)
    with pytest.raises(UserError, match=r"Input should be 'auto', 'hf', 'vllm', 'sglang' or 'openai', found 'vlm'"):
        ppo_config("rollout.name=vlm")


def test_auto_depends_on_the_device() -> None:
    assert (default_engine("cpu"), default_engine("cuda")) == ("hf", "vllm")
    assert engine_name(RolloutConfig(), "cpu") == "hf"
    assert engine_name(RolloutConfig(), "cuda") == "vllm"
    assert engine_name(RolloutConfig(name="hf"), "cuda") == "hf"
    assert (engine_dtype(RolloutConfig(), "cpu"), engine_dtype(RolloutConfig(), "cuda")) == ("float32", "bfloat16")
    assert engine_dtype(RolloutConfig(dtype="float32"), "cuda") == "float32"


def test_a_device_that_the_engine_does_not_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "vllm", EngineSpec("hpc_rl.rl.rollout.vllm.engine", {"cuda": "bfloat16"}, ("ipc",)))
    message = "rollout.name vllm does not support trainer.device=cpu: use rollout.name=hf, or trainer.device=cuda"
    with pytest.raises(UserError, match=message):
        ppo_config("rollout.name=vllm")


def test_temperature_and_top_p_with_adapters_depend_on_the_engine() -> None:
    words = ["model.lora.rank=4", "rollout.top_p=0.9", "rollout.temperature=0.8"]
    ppo_config(*words, "rollout.name=hf")
    with pytest.raises(UserError, match=r"cannot show that the adapters \(model\.lora\) reach the engine"):
        ppo_config(*words, "rollout.name=vllm")
    with pytest.raises(UserError, match=r"cannot show that the adapters \(model\.lora\) reach the engine"):
        ppo_config(*words, "rollout.name=hf", "algorithm.tis_cap=2")


def test_a_correction_needs_the_probabilities_after_truncation() -> None:
    ppo_config("rollout.name=sglang", "rollout.top_p=0.9")
    ppo_config("rollout.name=sglang", "algorithm.tis_cap=2")
    message = r"rollout\.name=sglang reports those before them; set rollout\.name=hf or vllm, or remove one of the two"
    for option in ("rollout.top_p=0.9", "rollout.top_k=5"):
        ppo_config("rollout.name=hf", "algorithm.tis_cap=2", option)
        with pytest.raises(UserError, match=message):
            ppo_config("rollout.name=sglang", "algorithm.tis_cap=2", option)


def test_sglang_has_one_gpu_for_each_engine_and_merged_adapters() -> None:
    ppo_config("rollout.name=sglang", "model.lora.rank=4")
    with pytest.raises(UserError, match=r"rollout\.name=sglang has no adapters of its own"):
        ppo_config("rollout.name=sglang", "model.lora.rank=4", "rollout.merge_lora=false")
    with pytest.raises(UserError, match=r"which rollout\.name=sglang does not support: set rollout\.name=vllm"):
        ppo_config("rollout.name=sglang", "rollout.tensor_parallel_size=2", "trainer.n_gpus_per_node=2")


SERVER = ("rollout.name=openai", "trainer.device=cpu", "rollout.openai.base_url=https://llm.example.org/v1")


def generate_config(*overrides: str) -> GenerateConfig:
    config = compose("generate", ["model.path=/model", "data.files=prompts.jsonl", *overrides])
    assert isinstance(config, GenerateConfig)
    return config


def test_a_server_of_others_generates_but_does_not_train() -> None:
    config = generate_config(*SERVER, "rollout.openai.key_variable=LLM_API_KEY")
    assert config.rollout.openai.model is None and not config.trainer.uses_gpus
    message = (
        r"rollout\.name=openai: each step changes the policy's weights.* set rollout\.name=hf or vllm or sglang \("
    )
    with pytest.raises(UserError, match=message):
        ppo_config("rollout.name=openai")


@pytest.mark.parametrize(
    "words, message",
    [
        (["rollout.name=openai", "trainer.device=cpu"], "set rollout.openai.base_url"),
        (["rollout.name=openai", "trainer.device=cuda"], "does not support trainer.device=cuda: .* trainer.device=cpu"),
        ([*SERVER[1:], "rollout.name=hf"], "base_url has no effect with rollout.name=hf: set rollout.name=openai"),
        ([*SERVER, "+rollout.engine_kwargs.top_k=3"], "engine_kwargs has no effect with rollout.name=openai"),
        ([*SERVER[:2], "rollout.openai.base_url=llm.example.org"], "expected an address such as https://llm"),
    ],
)
def test_options_of_a_server_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate_config(*words)


@pytest.mark.parametrize(
    "option",
    [
        "key_variable=sk-1234567890",
        "base_url=https://me:sk-1234567890@llm.example.org/v1",
        "base_url=https://llm.example.org/v1?key\\=sk-1234567890",
        "base_url=https://llm.example.org/v1#sk-1234567890",
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_shown(option: str) -> None:
    with pytest.raises(UserError, match="expected") as caught:
        generate_config(*SERVER, f"rollout.openai.{option}")
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_valid"),
    [
        *(("http://a/v1", True), ("http://10.0.0.1:8000/v1", True), ("http://[::1]:8000/v1", True)),
        *(("http://a:abc/v1", False), ("http://a:123456/v1", False), ("http://h\u00e9/v1", False), ("ftp://a", False)),
    ],
)
def test_addresses_of_servers(url: str, is_valid: bool) -> None:
    if is_valid:
        assert generate_config(*SERVER[:2], f"rollout.openai.base_url='{url}'").rollout.openai.base_url == url
    else:
        with pytest.raises(UserError, match="expected an address such as"):
            generate_config(*SERVER[:2], f"rollout.openai.base_url='{url}'")


def test_exported_variables_keep_their_value() -> None:
    vllm = ENGINES["vllm"]
    assert vllm.process_environment("cpu", {})["OMP_NUM_THREADS"] == "1"
    assert vllm.process_environment("cpu", {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in vllm.process_environment("cuda", {})
    assert vllm.process_environment("cuda", {})["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert ENGINES["sglang"].process_environment("cpu", {})["SGLANG_USE_CPU_ENGINE"] == "1"
    assert ENGINES["hf"].process_environment("cpu", {}) == {} == ENGINES["sglang"].process_environment("cuda", {})
