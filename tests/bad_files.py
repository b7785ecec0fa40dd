"""Files for tests of bad input: a small valid model without torch, and broken variants of models and data."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from tests.fake_apptainer import sif_bytes

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT = json.dumps({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}) + "\n"
PROMPT = json.dumps({"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}) + "\n"


def safetensors(data: bytes = bytes(8)) -> bytes:
    """Return a safetensors file with one tensor of 8 bytes, of which `data` is what the file holds."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def weights(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return a safetensors file with tensors of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def make_adapters(folder: Path, base: Path, inputs: int = 8, rank: int = 2, **changes: object) -> None:
    """Write a folder with adapters in the format of peft."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": rank, "lora_alpha": 4}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    found = weights({f"{layer}.lora_A.weight": (rank, inputs), f"{layer}.lora_B.weight": (4, rank)})
    (folder / "adapter_model.safetensors").write_bytes(found)


def write_adapters(root: Path) -> None:
    """Write a model with layers, and folders with adapters that fit it and that do not."""
    shapes = {f"model.layers.0.self_attn.{name}_proj.weight": (4, 8) for name in "qk"}
    base = make_model(root / "blocks", model__safetensors=weights({"model.embed_tokens.weight": (5, 8), **shapes}))
    settings = json.dumps({"model_type": "qwen2", "vocab_size": 9})
    other = make_model(root / "other-blocks", config__json=settings, model__safetensors=weights(shapes))
    larger = json.dumps({"model_type": "qwen2", "vocab_size": 5})
    (base / "config.json").write_text(larger)
    make_adapters(root / "adapters", base)
    make_adapters(root / "adapters-of-another", other)
    make_adapters(root / "adapters-of-the-hub", Path("me/another"), inputs=16)
    make_adapters(root / "adapters-of-600", base, rank=600)
    make_adapters(root / "dora", base, use_dora=True)
    make_adapters(root / "ia3", base, peft_type="IA3")
    make_adapters(root / "rank", base, r=3)
    make_adapters(root / "no-adapters", base)
    (root / "no-adapters" / "adapter_model.safetensors").unlink()


def make_model(folder: Path, **changes: str | bytes | None) -> Path:
    """Write a model folder that the checks accept.

    Args:
        changes: files to replace, with `__` for a dot -> contents, or None to leave the file out.
    """
    files: dict[str, str | bytes | None] = {
        "config.json": json.dumps({"model_type": "qwen2"}),
        "model.safetensors": safetensors(),
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}),
    }
    folder.mkdir()
    for name, contents in (files | {name.replace("__", "."): each for name, each in changes.items()}).items():
        if contents is not None:
            (folder / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    return folder


def write_models(root: Path) -> None:
    """Write the folder `model`, and one folder for each way in which a model can be broken."""
    make_model(root / "model")
    write_adapters(root)
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}
    make_model(root / "ours", tokenizer__json=json.dumps(vocabulary))
    make_model(root / "strange", tokenizer__json=json.dumps({"model": {"vocab": {"b": 0, "c": 1}}}))
    for name, end in {"ends": "<end>", "stops": {"content": "<stop>"}}.items():
        make_model(root / name, tokenizer_config__json=json.dumps({"chat_template": TEMPLATE, "eos_token": end}))
    make_model(root / "teacher")
    for name, kind in {"scorer": "Qwen2ForSequenceClassification", "language": "Qwen2ForCausalLM"}.items():
        make_model(root / name, config__json=json.dumps({"model_type": "qwen2", "architectures": [kind]}))
    classifier = json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]})
    make_model(root / "two-heads", config__json=classifier, model__safetensors=weights({"score.weight": (2, 8)}))
    make_model(root / "no-config", config__json=None)
    make_model(root / "bad-config", config__json="{")
    make_model(root / "empty-config", config__json="")
    make_model(root / "list-config", config__json="[]")
    make_model(root / "no-type", config__json="{}")
    make_model(root / "no-weights", model__safetensors=None)
    make_model(root / "truncated", model__safetensors=safetensors(bytes(3)))
    make_model(root / "too-long", model__safetensors=safetensors(bytes(9)))
    make_model(root / "empty-weights", model__safetensors=b"")
    make_model(root / "no-header", model__safetensors=b"\x00" * 64)
    make_model(root / "cut-header", model__safetensors=safetensors()[:20])
    make_model(root / "html", model__safetensors=b"<html>not found</html>")
    make_model(root / "pointer", model__safetensors=LFS_POINTER)
    make_model(root / "pointer-tokenizer", tokenizer__json=LFS_POINTER)
    make_model(root / "cut-bin", model__safetensors=None, **{"pytorch_model__bin": b"PK\x03\x04 and no end"})
    make_model(root / "pointer-bin", model__safetensors=None, **{"pytorch_model__bin": LFS_POINTER})
    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    make_model(root / "no-shard", model__safetensors__index__json=index)
    make_model(root / "no-tokenizer", tokenizer__json=None, tokenizer_config__json=None)
    make_model(root / "no-template", tokenizer_config__json="{}")
    make_model(root / "bad-template", tokenizer_config__json=json.dumps({"chat_template": "{% for x in %}"}))
    make_model(root / "bad-jinja", chat_template__jinja="{{ messages | no_such_filter }}")
    make_model(root / "binary-jinja", chat_template__jinja=b"\xff\xfe\x00")
    (root / "empty").mkdir()
    (root / "loop").symlink_to("loop")
    for name, text in {
        "open.jinja": "{% if x %}", "brace.jinja": "{{ messages ", "tag.jinja": "{% endfor %}",
        "filter.jinja": "{{ x|f }}", "template.bin": "\udcff",
    }.items():  # fmt: skip
        (root / name).write_bytes(text.encode(errors="surrogateescape"))


def write_data(root: Path) -> None:
    """Write train.jsonl and prompts.jsonl, and one file for each way in which data can be broken."""
    user = {"role": "user", "content": "1"}
    assistant = {"role": "assistant", "content": "2"}

    def row(**columns: object) -> str:
        return json.dumps(columns) + "\n"

    files: dict[str, str | bytes] = {
        "train.jsonl": CHAT * 8,
        "prompts.jsonl": PROMPT * 8,
        "pairs.jsonl": row(prompt="1", chosen="2", rejected="3") * 8,
        "other-prompts.jsonl": row(chosen=[user, assistant], rejected=[{**user, "content": "3"}, assistant]),
        "answered.jsonl": row(prompt=[user, assistant], chosen="2", rejected="3"),
        "scored.jsonl": "".join(row(index=0, prompt="1", response=str(i), score=float(i)) for i in range(2)),
        "single.jsonl": row(index=0, prompt="1", response="2", score=1.0),
        "unscored.jsonl": row(index=0, prompt="1", response="2") * 2,
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "not-json.jsonl": CHAT + "{messages: 1}\n",
        "cut.jsonl": CHAT + CHAT[:30],
        "number.jsonl": "3\n",
        "pointer.jsonl": LFS_POINTER,
        "utf16.jsonl": CHAT.encode("utf-16"),
        "latin.jsonl": '{"messages": "\xe9"}\n'.encode("latin-1"),
        "twice.jsonl": '{"messages": [], "messages": []}\n',
        "open.json": "[" + CHAT,
        "after.json": "[" + CHAT + "] x",
        "numbers.json": "[1, 2]",
        "columns.jsonl": row(question="1", answer="2"),
        "other.jsonl": row(foo="1"),
        "asked.jsonl": CHAT + row(messages=[user]),
        "null.jsonl": row(messages=None),
        "no-turns.jsonl": row(messages=[]),
        "no-role.jsonl": row(messages=[{"content": "1"}, assistant]),
        "no-content.jsonl": row(messages=[user, {"role": "assistant"}]),
        "text.jsonl": row(messages="1"),
        "strings.jsonl": row(messages=["1", "2"]),
        "number-answer.jsonl": row(question="1", answer=2),
        "empty.csv": "",
        "header.csv": "question,answer\n",
        "short.csv": "question,answer\n1\n",
        "twice.csv": "question,question\n1,2\n",
        "quote.csv": 'question,answer\n"1,2\n',
        "plain.csv": "question,answer\n1,2\n",
        "table.xlsx": b"PK\x03\x04",
        "notes.txt": "1\n",
        "data.arrow": b"ARROW1",
        "NOSUFFIX": "1\n",
        "no-magic.parquet": b"not parquet at all",
        "cut.parquet": b"PAR1" + bytes(40),
        "empty.parquet": b"",
        "pointer.parquet": LFS_POINTER,
        "encrypted.parquet": b"PARE" + bytes(40) + b"PARE",
        "null-answer.jsonl": row(messages=[user], answer=None),
        "alone.jsonl": row(messages=[assistant], answer="2"),
        "number-prompt.jsonl": row(messages=3, answer="2"),
        "no-answer.jsonl": row(messages=[user], solution="2"),
    }
    for name, contents in files.items():
        (root / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    (root / "empty-folder").mkdir()
    (root / "notes-folder").mkdir()
    (root / "notes-folder" / "README.md").write_text("no data")
    (root / "loop.jsonl").symlink_to("loop.jsonl")
    (root / "loop.parquet").symlink_to("loop.parquet")


def write_rewards(root: Path) -> None:
    """Write reward.py, and one file for each way in which a reward function can be wrong."""
    for name, source in {
        "reward.py": "def score(response, answer):\n    return 1.0\n\ndef other(response, answer):\n    return 0.0\n",
        "syntax.py": "def score(response, answer:\n",
        "constant.py": "score = 3\n",
        "text.py": "score = 'def score'\n",
        "table.py": "score = {'a': 1}\n",
        "class.py": "class score:\n    pass\n",
        "coroutine.py": "async def score(response, answer):\n    return 1.0\n",
        "one.py": "def score(response):\n    return 1.0\n",
        "three.py": "def score(response, answer, threshold):\n    return 1.0\n",
        "none.py": "def score():\n    return 1.0\n",
        "keyword.py": "def score(response, answer, *, scale):\n    return 1.0\n",
        "nothing.py": "",
        "binary.py": "\udcff\udcfe",
        "driver.py": "",
    }.items():
        (root / name).write_bytes(source.encode(errors="surrogateescape"))
    (root / "folder.py").mkdir()


def write_images(root: Path) -> None:
    """Write image.sif, and one file for each way in which an image can be wrong."""
    for name, contents in {
        "image.sif": sif_bytes(),
        "other.sif": b"not an image" * 40,
        "short.sif": sif_bytes()[:20],
        "empty.sif": b"",
        "pointer.sif": LFS_POINTER.encode(),
        "arm.sif": sif_bytes(architecture=b"04"),
    }.items():
        (root / name).write_bytes(contents)


def write_profiles(root: Path) -> None:
    """Write one site profile for each way in which a profile can be wrong."""
    for name, text in {
        "unknown": "slurm: {partion: gpu}\n",
        "section": "slurmm: {partition: gpu}\n",
        "type": "slurm: {exclusive: often}\n",
        "time": "slurm: {time: 24:00:00}\n",
        "mem": "slurm: {mem: lots}\n",
        "infinite": "ray: {object_store_gb: .inf}\n",
        "list": "- slurm\n",
        "text": "partition\n",
        "open": "slurm: {partition: [\n",
        "tab": "slurm:\n\tpartition: gpu\n",
        "twice": "slurm: {partition: a, partition: b}\n",
        "job": "optim: {lr: 1}\n",
        "whole": "slurm: gpu\n",
        "itself": "slurm: &a {sbatch: *a}\n",
        "top": "&a\nslurm: *a\n",
        "alias": "slurm: *nothing\n",
        "tag": "slurm: !!python/object:os.system {}\n",
        "owned": "slurm: {sbatch: {nodes: 2}}\n",
        "day": "slurm: {account: 2024-13-45}\n",
    }.items():
        (root / f"{name}.site.yaml").write_text(text)
    (root / "binary.site.yaml").write_bytes(b"\xff\xfe\x00\x00")
    (root / "folder.site.yaml").mkdir()


RECIPES: dict[str, dict[str, str | bytes]] = {
    "itself": {"configs/recipe/a.yaml": "# @package _global_\ndefaults: [a, _self_]\n"},
    "pair": {
        "configs/recipe/a.yaml": "# @package _global_\ndefaults: [b, _self_]\n",
        "configs/recipe/b.yaml": "# @package _global_\ndefaults: [a, _self_]\n",
    },
    "absent": {"configs/recipe/a.yaml": "# @package _global_\ndefaults: [nowhere, _self_]\n"},
    "open": {"configs/ppo.yaml": "data: {train_files: [a\n"},
    "list": {"configs/ppo.yaml": "- data\n"},
    "binary": {"configs/ppo.yaml": b"\xff\xfe\x00"},
    "unknown": {"configs/ppo.yaml": "optimizer: {lr: 1}\n"},
    "infinite": {"configs/ppo.yaml": "actor: {optim: {lr: .inf}}\n"},
    "nan": {"configs/ppo.yaml": "actor: {optim: {lr: .nan}}\n"},
    "time": {"configs/ppo.yaml": "slurm: {time: 24:00:00}\n"},
    "defaults": {"configs/ppo.yaml": "defaults: 3\n"},
    "interpolation": {"configs/ppo.yaml": "data: {max_prompt_length: '${nowhere}'}\n"},
    "circular": {"configs/ppo.yaml": "data: {max_prompt_length: '${data.max_response_length}', "
                                     "max_response_length: '${data.max_prompt_length}'}\n"},
    "tag": {"configs/ppo.yaml": "data: !!python/object:os.system {}\n"},
}  # fmt: skip
"""Folder -> files of a project whose recipe is wrong."""


def write_recipes(root: Path) -> None:
    for folder, files in RECIPES.items():
        for name, contents in files.items():
            path = root / "projects" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
