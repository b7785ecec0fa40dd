"""The shipped model files: each composes in every kind of job that has them, and its model can be planned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config import groups
from hpc_rl.config.compose import compose
from hpc_rl.data.templates.jinja_rendering import render_plainly, with_variables
from hpc_rl.errors import UserError
from hpc_rl.submission.planning import shapes_of

ROOT = Path(__file__).parents[2]
JOBS = {"sft": [], "dpo": [], "rm": [], "distill": ["teacher.path=/teacher"], "ppo": ["reward.function=gsm8k"]}
QWEN2 = {"model_type": "qwen2", "vocab_size": 151936}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
QWEN35 = {
    **{"model_type": "qwen3_5_text", "head_dim": 256, "vocab_size": 248320, "full_attention_interval": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    "linear_num_key_heads": 16,
}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 256}


def sizes(
    family: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, tied: bool = True, **more: int
) -> dict[str, Any]:
    named = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**family, **named, "num_attention_heads": heads, "tie_word_embeddings": tied, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": sizes(QWEN2, 896, 4864, 24, 14, num_key_value_heads=2),
    "qwen2.5-1.5b": sizes(QWEN2, 1536, 8960, 28, 12, num_key_value_heads=2),
    "qwen2.5-7b": sizes(QWEN2, 3584, 18944, 28, 28, False, num_key_value_heads=4, vocab_size=152064),
    "qwen3-0.6b": sizes(QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": sizes(QWEN3, 2048, 6144, 28, 16),
    "qwen3-4b": sizes(QWEN3, 2560, 9728, 36, 32),
    "qwen3-8b": sizes(QWEN3, 4096, 12288, 36, 32, False),
    "qwen3.5-0.8b": sizes(QWEN35, 1024, 3584, 24, 8, num_key_value_heads=2, linear_num_value_heads=16),
    "qwen3.5-2b": sizes(QWEN35, 2048, 6144, 24, 8, num_key_value_heads=2, linear_num_value_heads=16),
    "qwen3.5-4b": sizes(QWEN35, 2560, 9216, 32, 16, num_key_value_heads=4, linear_num_value_heads=32),
    "qwen3.5-9b": sizes(QWEN35, 4096, 12288, 32, 16, False, num_key_value_heads=4, linear_num_value_heads=32),
    "llama3.2-1b": sizes(LLAMA, 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3b": sizes(LLAMA, 3072, 8192, 28, 24, head_dim=128),
    "llama3.1-8b": sizes(LLAMA, 4096, 14336, 32, 32, False),
    "gemma3-1b": sizes(GEMMA3, 1152, 6912, 26, 4, num_key_value_heads=1, vocab_size=262144),
    "gemma3-4b": sizes(GEMMA3, 2560, 10240, 34, 8, num_key_value_heads=4, vocab_size=262208),
    "smollm3-3b": sizes({"model_type": "smollm3"}, 2048, 11008, 36, 16, num_key_value_heads=4, vocab_size=128256),
    "olmo2-1b": sizes({"model_type": "olmo2"}, 2048, 8192, 16, 16, False, num_key_value_heads=16, vocab_size=100352),
    "olmo3-7b": sizes({"model_type": "olmo3"}, 4096, 11008, 32, 32, False, num_key_value_heads=32, vocab_size=100278),
}
"""Name of a file -> the sizes in config.json of the model that it names."""


def composed(name: str, kind: str = "sft") -> Any:
    return compose(kind, [f"model={name}", "data.train_files=a.jsonl", *JOBS[kind]])


def rows() -> dict[str, list[str]]:
    """The table of the page about recipes."""
    section = (ROOT / "docs" / "recipes.md").read_text().partition("\n## model=\n")[2].partition("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines()[5:] if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in found}


def test_each_file_is_tried_and_in_the_table() -> None:
    assert set(groups.choices("model")) == CONFIGS.keys() == rows().keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_names_the_same_model_in_all_kinds_of_jobs(name: str) -> None:
    paths = {composed(name, kind).model.path for kind in JOBS}
    assert len(paths) == 1 and re.fullmatch(r"[A-Za-z-]+/[A-Za-z0-9.-]+", *paths)
    assert groups.path_of_choice("model", name) in paths
    assert rows()[name][0] == f"`{composed(name).model.path}`"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_can_be_planned_from_its_config_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the hub, as soon as its cache has the file."""
    cached = tmp_path / "hub" / f"models--{composed(name).model.path.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text(json.dumps(CONFIGS[name]))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    try:
        (shape,) = shapes_of(composed(name), ask_hub=False).values()
    except UserError as error:
        assert name.startswith("qwen3.5-") and "linear attention, whose memory is not planned" in str(error)
    else:
        assert shape.total == pytest.approx(float(rows()[name][1].split()[0]) * 1e9, rel=0.005)


def test_the_date_in_prompts_of_llama_stays() -> None:
    template = (
        "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = "
        "strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}Today Date: {{ date_string }}"
    )
    for name in ("llama3.2-1b", "llama3.2-3b"):
        fixed = with_variables(template, composed(name, "ppo").data.chat_template_kwargs)
        assert render_plainly(fixed, [], "here") == "Today Date: 26 Jul 2024"
