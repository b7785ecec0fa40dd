"""Bad input of every sort: one to three lines with the true cause, exit code 2, and nothing is left behind."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_rl import cli
from hpc_rl.config import compose
from hpc_rl.config.job import JobConfig
from hpc_rl.submission.preflight import checks
from hpc_rl.submission.series import sweep
from tests import bad_files

HEAVY = ("torch", "transformers", "safetensors", "ray", "vllm", "datasets", "pyarrow", "numpy", "tensordict", "pandas")
"""Packages that a login node may lack."""
MAX_LINES = 3
LONG = "n" * 300

_SFT = ("model.path=model", "data.train_files=train.jsonl", "data.train_batch_size=4", "trainer.device=cpu")
_PPO = (
    "model.path=model", "data.train_files=prompts.jsonl", "data.train_batch_size=4", "reward.function=exact",
    "rollout.n=2", "trainer.device=cpu",
)  # fmt: skip
_GENERATE = ("model.path=model", "data.files=prompts.jsonl", "trainer.device=cpu", "rollout.n=2")
VALID: dict[str, tuple[str, ...]] = {
    "sft": ("submit", "sft", "--dry-run", *_SFT),
    "dpo": ("submit", "dpo", "--dry-run", "model.path=model", "data.train_files=pairs.jsonl", *_SFT[2:]),
    "rm": ("submit", "rm", "--dry-run", "model.path=model", "data.train_files=pairs.jsonl", *_SFT[2:]),
    "distill": ("submit", "distill", "--dry-run", "teacher.path=teacher", *_SFT),
    "no-teacher": ("submit", "distill", "--dry-run", *_SFT),
    "ppo": ("submit", "ppo", "--dry-run", *_PPO),
    "generate": ("submit", "generate", "--dry-run", *_GENERATE),
    "eval": ("eval", "model", "--dry-run", *_GENERATE[1:], "reward.function=exact"),
    "select-job": ("submit", "select", "--dry-run", "select.responses=scored.jsonl"),
    "torchrun": ("submit", "torchrun", "--dry-run", "trainer.device=cpu"),
    "ray": ("submit", "ray", "--dry-run", "trainer.device=cpu"),
    "sweep": ("sweep", "sft", "--dry-run", *_SFT),
    "sweep-files": ("sweep", "sft", "--dry-run", *_SFT[2:]),
    "recipe": ("submit", "ppo", "--dry-run", *_PPO),
    "none": (),
}
"""Commands that are valid (with what follows `--`, or with a swept key) until a case adds its words."""


class Case(NamedTuple):
    command: str
    """Name of a row of VALID."""
    words: tuple[str, ...]
    expected: str
    """Part of the message that only the true cause brings about."""
    folder: str = "."
    same_python: bool = False
    """Whether the mistake can be seen only if the job runs the Python of the login node."""


def select(expected: str, *words: str) -> Case:
    return Case("none", ("data", "select", "--output", "out.jsonl", *words), expected)


def sft(expected: str, *words: str) -> Case:
    return Case("sft", words, expected)


def ppo(expected: str, *words: str) -> Case:
    return Case("ppo", words, expected)


def dpo(expected: str, *words: str) -> Case:
    return Case("dpo", words, expected)


def rm(expected: str, *words: str) -> Case:
    return Case("rm", words, expected)


def distill(expected: str, *words: str) -> Case:
    return Case("distill", words, expected)


def each(command: str, expected: str, *words: str) -> list[Case]:
    return [Case(command, (word,), expected) for word in words]


DATA = [
    sft("data.train_files: none.jsonl: no such data file", "data.train_files=none.jsonl"),
    sft("none.csv: no such data file", "data.train_files=none.csv"),
    sft("the data set is empty", "data.train_files=empty.jsonl"),
    sft("the data set is empty", "data.train_files=blank.jsonl"),
    sft("not-json.jsonl, line 2: not JSON", "data.train_files=not-json.jsonl"),
    sft("cut.jsonl, line 2: not JSON", "data.train_files=cut.jsonl"),
    sft("number.jsonl, line 1: found a number; an object", "data.train_files=number.jsonl"),
    sft("git-lfs pointer", "data.train_files=pointer.jsonl"),
    sft("utf16.jsonl, line 1: not UTF-8", "data.train_files=utf16.jsonl"),
    sft("latin.jsonl, line 1: not UTF-8", "data.train_files=latin.jsonl"),
    sft("'messages' appears twice", "data.train_files=twice.jsonl"),
    sft("open.json, line 2: not JSON", "data.train_files=open.json"),
    sft("text after the end of the array", "data.train_files=after.json"),
    sft("numbers.json, line 1: found a number", "data.train_files=numbers.json"),
    sft("data.prompt_key=question data.response_key=answer", "data.train_files=columns.jsonl"),
    sft("no column 'messages'", "data.train_files=other.jsonl"),
    sft("no assistant turn", "data.train_files=asked.jsonl"),
    sft("has null; a list", "data.train_files=null.jsonl"),
    sft("has an empty list", "data.train_files=no-turns.jsonl"),
    sft("message 1 of 'messages' is not of the form", "data.train_files=no-role.jsonl"),
    sft("message 2 of 'messages' has no text", "data.train_files=no-content.jsonl"),
    sft("has text, but a list of messages", "data.train_files=text.jsonl"),
    sft("message 1 of 'messages' is not of the form", "data.train_files=strings.jsonl"),
    sft("'answer' has a number; text", "data.train_files=number-answer.jsonl", "data.prompt_key=question",
        "data.response_key=answer"),
    sft("data.prompt_key=question", "data.train_files=columns.jsonl", "data.prompt_key=quetsion",
        "data.response_key=answer"),
    sft("the data set is empty", "data.train_files=empty.csv"),
    sft("the data set is empty", "data.train_files=header.csv"),
    sft("short.csv, line 2: values: 1, columns in the header: 2", "data.train_files=short.csv"),
    sft("'question' more than once", "data.train_files=twice.csv"),
    sft("quote.csv, line 2", "data.train_files=quote.csv"),
    sft("no column 'messages'", "data.train_files=plain.csv"),
    sft(".xlsx files are not read; convert it to one of .jsonl", "data.train_files=table.xlsx"),
    sft(".txt files are not read", "data.train_files=notes.txt"),
    sft(".arrow files are not read", "data.train_files=data.arrow"),
    sft("no suffix", "data.train_files=NOSUFFIX"),
    sft(".zip files are not read", "data.train_files=none.zip"),
    sft("does not start with PAR1", "data.train_files=no-magic.parquet"),
    sft("cut.parquet is truncated", "data.train_files=cut.parquet"),
    sft("does not start with PAR1", "data.train_files=empty.parquet"),
    sft("git-lfs pointer", "data.train_files=pointer.parquet"),
    sft("encrypted parquet", "data.train_files=encrypted.parquet"),
    sft("loop.jsonl: no such data file", "data.train_files=loop.jsonl"),
    sft("loop.parquet: no such data file", "data.train_files=loop.parquet"),
    sft("no such data file or folder", "data.train_files=/no/such/folder"),
    sft("no such data file or folder", "data.train_files=../nowhere"),
    sft("the data folder is empty", "data.train_files=empty-folder"),
    sft("no data file in this folder", "data.train_files=notes-folder"),
    sft("has 306 bytes; the limit is 255", f"data.train_files={LONG}.jsonl"),
    sft("more than 4095 bytes", f"data.train_files={'a/' * 3000}b.jsonl"),
    sft("data.train_files: name at least one data file", "data.train_files=[]"),
    sft("data.train_files.0: the path is empty", "data.train_files="),
    sft("a has the weight '0'; a weight is a positive number", "data.train_files={a: 0}"),
    sft("train_files: none.jsonl: no such data file", "data.train_files={train.jsonl: 1, none.jsonl: 2}"),
    sft("none.jsonl: no such data file", "data.train_files=[train.jsonl,none.jsonl]"),
    sft("data.val_files: none.jsonl: no such data file", "data.val_files=none.jsonl"),
    sft("the data set is empty", "data.val_files=empty.jsonl"),
    sft("larger than the training data (8 rows)", "data.train_batch_size=9"),
    sft("larger than the training data (16 rows)", "data.train_files=[train.jsonl,train.jsonl]",
        "data.train_batch_size=64"),
    sft("not in the cache", "data.train_files=nobody/nothing", "cache.offline=true", "cache.hf_home=empty"),
    ppo("larger than the training data (8 rows)", "data.train_batch_size=9"),
    ppo("'answer' has null", "data.train_files=null-answer.jsonl"),
    ppo("only an assistant turn", "data.train_files=alone.jsonl"),
    ppo("has a number; text or a list", "data.train_files=number-prompt.jsonl"),
    ppo("set data.answer_key=solution", "data.train_files=no-answer.jsonl"),
    ppo("no column 'question'", "data.prompt_key=question"),
    ppo("does not start with PAR1", "data.val_files=no-magic.parquet"),
    ppo("the data folder is empty", "data.train_files=empty-folder"),
]  # fmt: skip

PREFERENCES = [
    dpo("row 1: found one chat (column messages) where a pair", "data.train_files=train.jsonl"),
    rm("row 1: found one chat (column messages) where a pair", "data.train_files=train.jsonl"),
    sft("row 1: found a pair of responses (columns chosen and rejected)", "data.train_files=pairs.jsonl"),
    sft("model.path qwen2.5-0.5b is a short name, which only model=qwen2.5-0.5b takes: write Qwen/Qwen2.5-0.5B",
        "model.path=qwen2.5-0.5b"),
    dpo("no column 'better' (data.chosen_key); columns: chosen, prompt, rejected", "data.chosen_key=better"),
    dpo("are swapped: the model would learn the worse responses", "data.chosen_key=rejected",
        "data.rejected_key=chosen"),
    dpo("begin with different messages", "data.train_files=other-prompts.jsonl"),
    dpo("the columns may be swapped", "data.train_files=answered.jsonl"),
    dpo("larger than the training data (8 rows)", "data.train_batch_size=9"),
    dpo("algorithm.loss=kto learns from single responses with labels", "algorithm.loss=kto"),
    dpo("needs pairs: remove it, or set algorithm.loss=kto", "data.label_key=label"),
    dpo("no column 'label' (data.label_key)", "algorithm.loss=kto", "data.label_key=label",
        "data.response_key=chosen"),
    dpo("label_smoothing has no effect with loss=ipo", "algorithm.loss=ipo", "algorithm.label_smoothing=0.1"),
    dpo("uses no reference; remove it", "algorithm.loss=simpo", "ref.path=model"),
    dpo("algorithm.loss=orpo uses no reference; remove it", "algorithm.loss=orpo", "ref.precompute_logprobs=false"),
    dpo("gamma has no effect with loss=sigmoid: use loss=simpo, or remove it", "algorithm.gamma=0.6"),
    dpo("desirable_weight has no effect with loss=ipo: use loss=kto", "algorithm.loss=ipo",
        "algorithm.desirable_weight=2"),
    dpo("undesirable_weight has no effect with loss=sigmoid: use loss=kto", "algorithm.undesirable_weight=2"),
    rm("response_key=chosen has no effect on pairs: set label_key", "data.response_key=chosen"),
    dpo("for each of two samples needs 8000 tokens", "data.max_length=4000", "trainer.micro_tokens=4096"),
    dpo("ref.path ./none: there is no such folder", "ref.path=./none"),
    dpo("3 tokens differ, for example 'c', which is 1 and missing", "model.path=ours", "ref.path=strange"),
    dpo("eos_token is '<end>' and '<stop>'", "model.path=stops", "ref.path=ends"),
    dpo("model.path scorer is a classifier", "model.path=scorer"),
    dpo("ref.path scorer is a classifier", "ref.path=scorer"),
    sft("model.path scorer is a classifier", "model.path=scorer"),
    ppo("reward.model language is a language model", "reward.function=null", "reward.model=language"),
    ppo("3 tokens differ, for example 'c', which is 1 and missing", "reward.function=null", "model.path=ours",
        "reward.model=strange"),
    ppo("critic.path strange and model.path ours have different vocabularies", "model.path=ours",
        "critic.path=strange"),
    rm("no column 'margin' (data.margin_key)", "data.margin_key=margin"),
    rm("remove one of them", "data.margin_key=margin", "data.label_key=label"),
    rm("label_keys means single responses, but margin_key belongs to pairs", "data.margin_key=margin",
       "data.label_keys=[a,b]"),
    rm("label_key=label and label_keys=[a,b]: set one of them", "data.label_key=label", "data.label_keys=[a,b]"),
    rm("label_keys has one column, a: name at least two, or set label_key=a", "data.label_keys=[a]"),
    rm("label_keys [a, b, a] has a name twice", "data.label_keys=[a,b,a]"),
    rm("no column 'a' (data.label_keys)", "data.label_keys=[a,b]", "data.response_key=chosen"),
    rm("model.path two-heads has 2 outputs, not 1: name one column in data.label_keys", "model.path=two-heads"),
    rm("model.path two-heads has 2 outputs, not 3", "model.path=two-heads", "data.label_keys=[a,b,c]"),
    dpo("label_keys: unknown key", "data.label_keys=[a,b]"),
    ppo("reward.model two-heads has 2 outputs, not 1: set reward.weights", "reward.function=null",
        "reward.model=two-heads"),
    ppo("reward.model two-heads has 2 outputs, not 3: set reward.weights", "reward.function=null",
        "reward.model=two-heads", "reward.weights=[1,2,3]"),
    ppo("reward.weights has one number, and a reward.model with one output needs no weight", "reward.function=null",
        "reward.model=two-heads", "reward.weights=[1]"),
    ppo("critic.path two-heads has 2 outputs, not 1", "critic.path=two-heads"),
]  # fmt: skip

_STREAM = ("data.train_files=me/Sums", "data.stream_rows=100", "trainer.total_training_steps=10")
STREAMS = [
    sft("stream_rows: Input should be greater than or equal to 1", *_STREAM, "data.stream_rows=0"),
    sft("data.stream_rows=100: the rows of the data set are not counted before training, so that an epoch has no known "
        "number of steps: set trainer.total_training_steps", *_STREAM, "trainer.total_training_steps=null"),
    sft("data.stream_rows=100 reads one data set from its beginning to its end, so data.train_files cannot have",
        *_STREAM, "data.train_files={me/Sums: 1, me/Other: 2}"),
    sft("data.stream_rows=100 reads one data set on the hub, and data.train_files names 2: name one",
        *_STREAM, "data.train_files=[me/Sums,me/Other]"),
    sft("data.stream_rows=100 is for a data set that is not downloaded, and data.val_files=me/Sums:other would",
        *_STREAM, "data.val_files=[train.jsonl,me/Sums:other]"),
    sft("data.stream_rows=7 is smaller than data.train_batch_size=8", *_STREAM, "data.stream_rows=7",
        "data.train_batch_size=8"),
    sft("data.train_files: data.stream_rows reads a data set on the hub, and train.jsonl is on this machine", *_STREAM,
        "data.train_files=train.jsonl"),
    sft("data.train_files: data.stream_rows reads a data set on the hub, and model is on this machine", *_STREAM,
        "data.train_files=model"),
    *(sft(f"data.train_files: {name}: no such data file, and data.stream_rows reads a data set on the hub: name one",
          *_STREAM, f"data.train_files={name}") for name in ("none.jsonl", "data/chats.jsonl", "/data/chats.parquet")),
    sft("data.train_files: /none/chats: there is no such data file or folder", *_STREAM,
        "data.train_files=/none/chats"),
    sft("data.train_files: me/Sums/more: not the name of a data set on the hub", *_STREAM,
        "data.train_files=me/Sums/more"),
    sft("data.stream_rows reads me/Sums from the hub while the run trains, and compute nodes are offline "
        "(cache.offline): let the first node reach the hub, or fetch the data (hpc-rl fetch me/Sums)", *_STREAM,
        "cache.offline=true"),
    *(sft(f"data.stream_rows reads me/Sums from the hub while the run trains, and compute nodes are offline ({name} is "
          "set): let the first node reach the hub", *_STREAM, "slurm.env.HF_HUB_OFFLINE=", f"slurm.env.{name}=1")
      for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")),
    dpo("data.stream_rows=100 reads rows while the run trains, and ref.precompute_logprobs=true needs all of them "
        "before: set ref.precompute_logprobs=false", *_STREAM),
    distill("data.stream_rows=100 reads rows while the run trains, and teacher.precompute_top_k=true needs all of them",
            *_STREAM, "teacher.precompute_top_k=true", "teacher.top_k=4"),
    ppo("data.stream_rows: unknown key", "data.stream_rows=100"),
]  # fmt: skip

TEACHERS = [
    Case("no-teacher", ("trainer.seed=2",), "teacher.path: required, but not given"),
    distill("teacher.path ./none: there is no such folder", "teacher.path=./none"),
    distill("teacher.path scorer is a classifier", "teacher.path=scorer"),
    distill("3 tokens differ, for example 'c', which is 1 and missing", "model.path=ours", "teacher.path=strange"),
    distill("eos_token is '<end>' and '<stop>'; choose a model of the same family, or train with this tokenizer: "
            "model.tokenizer_path=ends", "model.path=stops", "teacher.path=ends"),
    distill("teacher.path and model.path are both model: the model has nothing to learn", "teacher.path=model"),
    distill("teacher.ranks_per_node=4 leaves no rank of a node to train the model: a node has 4",
            "teacher.ranks_per_node=4", "trainer.n_gpus_per_node=4"),
    distill("ranks_per_node: Input should be greater than or equal to 1", "teacher.ranks_per_node=0"),
    distill("ranks_per_node=1 with precompute_top_k=true would leave these ranks without work",
            "teacher.ranks_per_node=1", "trainer.n_gpus_per_node=2", "teacher.top_k=8",
            "teacher.precompute_top_k=true"),
    distill("precompute_top_k=true without top_k would store the whole vocabulary", "teacher.precompute_top_k=true"),
    distill("js_weight has no effect with divergence=forward", "algorithm.js_weight=0.3"),
    distill("algorithm.js_weight: Input should be less than 1", "algorithm.divergence=js", "algorithm.js_weight=1"),
    ppo("algorithm.advantage=opd learns from a teacher: set teacher.path", "algorithm.advantage=opd"),
    ppo("the policy has nothing to learn from itself", "algorithm.advantage=opd", "teacher.path=model"),
    ppo("coeff=2 has no effect without a teacher", "teacher.coeff=2"),
    ppo("teacher.path ./none: there is no such folder", "teacher.path=./none"),
    ppo("algorithm.filter_groups changes rewards, which algorithm.advantage=opd does not use",
        "algorithm.advantage=opd", "teacher.path=teacher", "algorithm.filter_groups=true"),
    ppo("algorithm.kl.where=reward changes rewards", "algorithm.advantage=opd", "teacher.path=teacher",
        "algorithm.kl.where=reward"),
    ppo("reward.function: required, but not given", "reward.function=null", "teacher.path=teacher"),
]  # fmt: skip
GENERATION = [
    Case("generate", ("rollout.temperature=0",), "all responses are the same: raise the temperature"),
    Case("generate", ("reward.model=language",), "reward.model language is a language model"),
    Case("generate", ("reward.model=two-heads",), "reward.model two-heads has 2 outputs, not 1"),
    Case("generate", ("reward.model=./none",), "reward.model ./none: there is no such folder"),
    Case("generate", ("model.path=ours", "reward.model=strange"), "reward.model strange and model.path ours have"),
    Case("generate", ("reward.model=scorer", "trainer.micro_tokens=600"), "the reward model reads whole samples"),
    Case("generate", ("reward.model=scorer", "reward.function=exact"), "found function and model"),
    Case("generate", ("pools.roles.reward=judges",), "is judges, which is not one of the pools: global_pool"),
    Case("generate", ("pools.roles.actor=global_pool",), "pools.roles.actor: this job trains nothing"),
    Case(
        "generate",
        ("pools.spec={gen: [1], judges: [1]}", "pools.roles.reward=judges"),
        "pool judges has no role: this job has no reward, so leave it out",
    ),
    Case(
        "generate",
        ("pools.spec={gen: [1], judges: [1]}", "pools.roles.reward=judges", "reward.model=scorer"),
        "pool gen needs 1 CPU slots; pool judges needs 1 CPU slots; the job has 1 x 1",
    ),
    Case("generate", ("reward.function=exact", "reward.url=http://a"), "found function and url"),
    Case("generate", ("reward.function=none/where.py:score",), "no such file: none/where.py"),
    Case("generate", ("data.files=none.jsonl",), "data.files: none.jsonl: no such data file"),
    Case("generate", ("data.files=[prompts.jsonl,prompts.jsonl]",), "names prompts.jsonl twice"),
    Case("generate", ("data.answer_key=nothing",), "no column 'nothing'"),
    Case("generate", ("rollout.tensor_parallel_size=2", "rollout.name=hf"), "rollout.name=hf does not support"),
    Case(
        "generate", ("rollout.name=vllm", "rollout.tensor_parallel_size=2"), "does not divide the 1 CPU slots per node"
    ),
    Case("generate", ("optim.lr=1",), "optim.lr: unknown key"),
    Case("generate", ("model.path=scorer",), "model.path scorer is a classifier"),
    Case("eval", ("reward.function=null",), "reward.function: required, but not given"),
    Case("eval", ("model.path=other",), "the model is the first argument, model: leave model.path out"),
    Case("eval", ("data=",), "name at least one data file: data=FILE[,FILE...]"),
    Case("eval", ("data=prompts.jsonl,none.jsonl",), "none.jsonl: no such data file"),
    select("no column 'index', so this is not a response", "train.jsonl", "--pairs"),
    select("choose exactly one of --best-of-n, --pairs", "scored.jsonl", "--pairs", "--best-of-n"),
    select("choose exactly one of --best-of-n, --pairs, --all-pairs and --threshold, found 0", "scored.jsonl"),
    select("the prompt has one response", "single.jsonl", "--best-of-n"),
    select("the responses have no scores", "unscored.jsonl", "--threshold", "1"),
    Case("select-job", ("select.method=threshold",), "select.threshold belongs to select.method=threshold"),
    Case("select-job", ("select.method=pairs", "trainer.nnodes=2"), "a selection is the work of one CPU"),
    Case("select-job", ("select.method=pairs", "select.responses=unscored.jsonl"), "the responses have no scores"),
    Case("select-job", ("select.method=pairs", "select.responses=none.jsonl"), "none.jsonl: no such data file"),
]
ADAPTERS = [
    sft("model.lora.rank: Input should be greater than or equal to 1", "model.lora.rank=0"),
    sft("alpha has no effect without adapters: set rank, or remove alpha", "model.lora.alpha=8"),
    sft("target_modules: qproj matches no linear layer of the model's transformer blocks; the linear",
        "model.path=blocks", "model.lora.rank=4", "model.lora.target_modules=[q_proj,qproj]"),
    sft("model.lora.path none: there is no such folder", "model.path=blocks", "model.lora.path=none"),
    sft("have their own rank; remove rank", "model.path=blocks", "model.lora.path=adapters", "model.lora.rank=2"),
    sft("not a folder with adapters in the format of peft: it has no adapter_config.json", "model.path=blocks",
        "model.lora.path=empty"),
    dpo("it has no adapter_model.safetensors", "model.path=blocks", "model.lora.path=no-adapters"),
    rm("other-blocks) than model.path blocks: vocab_size is 9 there and 5 here; set model.path", "model.path=blocks",
        "model.lora.path=adapters-of-another"),
    ppo("the adapter of model.layers.0.self_attn.q_proj is for a weight of 4 x 16, which here has the shape 4 x 8",
        "model.path=blocks", "model.lora.path=adapters-of-the-hub"),
    sft("which here is missing", "model.lora.path=adapters"),
    sft("has adapters with use_dora, which is not supported", "model.path=blocks", "model.lora.path=dora"),
    sft("has adapters of type IA3, but only LORA is supported", "model.path=blocks", "model.lora.path=ia3"),
    sft("has no adapters of rank 3", "model.path=blocks", "model.lora.path=rank"),
    sft("it has no config.json", "model.path=adapters"),
    dpo("the policy has no dropout in DPO", "model.lora={rank: 4, dropout: 0.1}"),
    ppo("the policy has no dropout in reinforcement learning", "model.lora={rank: 4, dropout: 0.1}"),
    ppo("cannot show that the adapters (model.lora) reach the engine", "model.lora.rank=4", "rollout.top_p=0.9",
        "algorithm.tis_cap=2"),
    ppo("cannot show that the adapters (model.lora) reach the engine", "model.lora.rank=4", "rollout.top_k=9",
        "rollout.temperature=0.8", "rollout.name=vllm"),
    ppo("the reference is the actor without its adapters; remove it", "model.lora.rank=4",
        "algorithm.kl.where=reward", "pools={spec: {a: [1], b: [1]}, roles: {ref: b, actor: a}}",
        "trainer.n_gpus_per_node=2"),
    sft("quantize has no effect without adapters: set rank, or remove quantize", "model.lora.quantize=nf4"),
    sft("model.lora.quantize=nf4 needs GPUs of type cuda, and trainer.device is cpu: remove it", "trainer.device=cpu",
        "model.lora={rank: 4, quantize: nf4}"),
    ppo("model.lora.quantize=nf4 needs GPUs of type cuda, and trainer.device is cpu", "trainer.device=cpu",
        "model.lora={rank: 4, quantize: nf4}"),
    sft("model.use_liger=true needs GPUs of type cuda, and trainer.device is cpu: remove it", "trainer.device=cpu",
        "model.use_liger=true"),
    sft("use_liger and use_torch_compile both fuse the operations of a layer: set one of them", "trainer.device=cuda",
        "model.use_liger=true", "model.use_torch_compile=true"),
    dpo("model.lora.quantize: Input should be 'nf4'", "model.lora={rank: 4, quantize: int8}"),
    ppo("the engines' model would not have the policy's 4-bit weights; remove", "model.lora={rank: 4, quantize: nf4}",
        "rollout.merge_lora=false", "rollout.name=vllm"),
    ppo("rollout.merge_lora=false has no effect without adapters: set model.lora.rank", "rollout.merge_lora=false"),
    ppo("rollout.name=hf has no adapters of its own, and takes merged weights only; set rollout.name=vllm",
        "model.lora.rank=4", "rollout.merge_lora=false", "rollout.name=hf"),
    ppo("model.lora.rank is 600, and engines compute with adapters of rank 512 or less", "model.lora.rank=600",
        "rollout.merge_lora=false", "rollout.name=vllm"),
    ppo("has adapters of rank 600, and engines compute with adapters of rank 512 or less", "model.path=blocks",
        "model.lora.path=adapters-of-600", "rollout.merge_lora=false", "rollout.name=vllm"),
]  # fmt: skip

TEMPLATES = [
    sft("data.chat_template none.jinja: there is no such file", "data.chat_template=none.jinja"),
    sft("data.chat_template empty: there is no such file", "data.chat_template=empty"),
    sft("Jinja rejects the chat template in line 1", "data.chat_template=open.jinja"),
    sft("Jinja rejects the chat template in line 1", "data.chat_template=brace.jinja"),
    sft("unknown tag 'endfor'", "data.chat_template=tag.jinja"),
    sft("No filter named 'f'", "data.chat_template=filter.jinja"),
    sft("cannot read template.bin", "data.chat_template=template.bin"),
    sft("the tokenizer in bad-template: Jinja rejects", "model.path=bad-template"),
    sft("No filter named 'no_such_filter'", "model.path=bad-jinja"),
    sft("chat_template.jinja", "model.path=binary-jinja"),
    sft("has no chat template; set data.chat_template", "model.path=no-template"),
    ppo("Jinja rejects the chat template in line 1", "data.chat_template=open.jinja"),
]
MODELS = [
    sft("model.path ./none: there is no such folder", "model.path=./none"),
    sft("model.path /no/such/model: there is no such folder", "model.path=/no/such/model"),
    sft("model.path a b: there is no such folder", "model.path=a b"),
    sft("model.path a/b/c: there is no such folder", "model.path=a/b/c"),
    sft("model.path train.jsonl is a file", "model.path=train.jsonl"),
    sft("there is no such folder", "model.path=./loop"),
    sft("has 300 bytes; the limit is 255", f"model.path={LONG}"),
    sft("model.path: the path is empty", "model.path="),
    sft("it has no config.json", "model.path=empty"),
    sft("it has no config.json", "model.path=no-config"),
    sft("config.json has no model_type", "model.path=bad-config"),
    sft("config.json is empty", "model.path=empty-config"),
    sft("config.json has no model_type", "model.path=list-config"),
    sft("config.json has no model_type", "model.path=no-type"),
    sft("no-weights has no weights", "model.path=no-weights"),
    sft("model.safetensors is truncated", "model.path=truncated"),
    sft("model.safetensors is damaged", "model.path=too-long"),
    sft("model.safetensors is empty", "model.path=empty-weights"),
    sft("is not a safetensors file", "model.path=no-header"),
    sft("model.safetensors is truncated", "model.path=cut-header"),
    sft("is not a safetensors file", "model.path=html"),
    sft("model.safetensors is a git-lfs pointer", "model.path=pointer"),
    sft("tokenizer.json is a git-lfs pointer", "model.path=pointer-tokenizer"),
    sft("pytorch_model.bin is truncated", "model.path=cut-bin"),
    sft("pytorch_model.bin is a git-lfs pointer", "model.path=pointer-bin"),
    sft("model-2.safetensors missing", "model.path=no-shard"),
    sft("no-tokenizer has no tokenizer", "model.path=no-tokenizer"),
    sft("empty has no tokenizer", "model.tokenizer_path=empty"),
    sft("model.tokenizer_path ./none: there is no such folder", "model.tokenizer_path=./none"),
    sft("model.tokenizer_path train.jsonl", "model.tokenizer_path=train.jsonl"),
    sft("not in the cache", "model.path=nobody/nothing", "cache.offline=true", "cache.hf_home=empty"),
    sft("not in the cache", "model.tokenizer_path=nobody/nothing", "cache.offline=true", "cache.hf_home=empty"),
    sft("there is no model 'qwen'; choose one of gemma3-1b", "model=qwen"),
    sft("for any other write model.path=Qwen/Qwen3-8B", "model=Qwen/Qwen3-8B"),
    sft("model=: no name is given", "model="),
    ppo("critic.path ./none: there is no such folder", "critic.path=./none"),
    ppo("model.safetensors is truncated", "critic.path=truncated"),
    ppo("reward.model ./none: there is no such folder", "reward.function=null", "reward.model=./none"),
    ppo("model.safetensors is a git-lfs pointer", "reward.function=null", "reward.model=pointer"),
    ppo("did you mean algorithm=grpo?", "algorithm=grop"),
    ppo("did you mean recipe=gsm8k-2nodes?", "recipe=gsm8k-2node"),
    ppo("there is no algorithm 'x'; choose one of cispo, dapo, dr_grpo, grpo, gspo", "algorithm=x"),
    sft("sft has no choice of recipe", "recipe=gsm8k-1node"),
]
KEYS = [
    sft("optim.learning_rate: unknown key; did you mean optim.lr?", "optim.learning_rate=1"),
    sft("lr: unknown key; did you mean optim.lr?", "lr=1"),
    sft("did you mean trainer.total_epochs?", "trainer.total_epoch=3"),
    sft("did you mean trainer.total_epochs?", "epochs=3"),
    sft("did you mean trainer.n_gpus_per_node?", "trainer.n_gpu_per_node=3"),
    sft("did you mean data.train_batch_size?", "batch_size=3"),
    sft("did you mean slurm.partition?", "slurm.partion=gpu"),
    sft("did you mean slurm.time?", "trainer.time=1:00:00"),
    sft("zzz: unknown key", "zzz=1"),
    sft("rollout.n: unknown key", "rollout.n=1"),
    ppo("did you mean actor.optim.lr or critic.optim.lr?", "optim.lr=1"),
    ppo("did you mean algorithm.kl.coef?", "algorithm.kl_coef=0.1"),
    ppo("did you mean rollout.temperature or rollout.val.temperature?", "temperature=1"),
    sft("is not an option: write key=value", "trainer.total_epochs"),
    sft("is not an option: write key=value", "=3"),
    sft("is not an option: write key=value", "~optim"),
    Case("torchrun", ("train.py",), "put -- before the program: hpc-rl submit torchrun -- train.py"),
    sft("choose a site profile with --site typed-gres", "site=typed-gres"),
    *each("sft", "cannot be read", "optim.lr=[1", "optim.lr={", "optim.betas=[0.9,", "optim.lr=]", "optim.lr=a b}",
          "optim.lr='1", "optim.betas=(1,2", "trainer.seed=${"),
    sft("Interpolation key 'nowhere' not found", "optim.lr=${nowhere}"),
    *each("sft", "finite number", "optim.lr=inf", "optim.lr=nan", "optim.eps=inf", "optim.weight_decay=nan",
          "optim.clip_grad=inf", "trainer.save_minutes=inf", "optim.betas=[0.9,nan]"),
    *each("ppo", "finite number", "rollout.temperature=inf", "reward.on_error=nan", "ray.object_store_gb=inf",
          "rollout.engine_kwargs={a: [1, inf]}", "reward.kwargs={scale: nan}", "algorithm.kl.coef=inf"),
    *each("sft", "optim.betas", "optim.betas=[0.9,1]", "optim.betas=[-0.1,0.9]", "optim.betas=[1.5,0.9]",
          "optim.betas=[0.9]", "optim.betas=0.9", "optim.betas=[0.9,0.95,0.99]", "optim.betas=[a,b]"),
    *each("sft", "expected a number, found true", "trainer.seed=true", "optim.lr=true", "trainer.nnodes=true"),
    *each("sft", "greater than", "optim.lr=0", "optim.lr=-1", "trainer.nnodes=0",
          "trainer.total_epochs=0", "data.max_length=1", "data.train_batch_size=0", "trainer.max_ckpt_to_keep=0"),
    *each("sft", "less than", "optim.warmup_ratio=2", "optim.min_lr_ratio=1.1", "trainer.seed=99999999999999999999"),
    *each("sft", "expected a whole number", "trainer.nnodes=two", "trainer.nnodes=1.5", "trainer.total_epochs=many",
          "data.max_length=1k", "trainer.nnodes=[2]", "trainer.nnodes=null"),
    *each("sft", "expected a number, found", "optim.lr=fast", "optim.lr=1e", "optim.lr=[1]", "optim.lr=null"),
    *each("sft", "expected true or false", "trainer.packing=maybe", "data.shuffle=2",
          "model.trust_remote_code=[true]"),
    sft("'npu', 'xpu' or 'cpu'", "trainer.device=tpu"),
    sft("'cosine', 'linear' or 'constant'", "optim.lr_scheduler=step"),
    sft("or 'constant', found 'cosin'; did you mean cosine?", "optim.lr_scheduler=cosin"),
    sft("'float32' or 'bfloat16'", "model.dtype=float16"),
    sft("'auto', 'full', 'hybrid', 'gradients' or 'none'", "trainer.sharding=zero3"),
    sft("use trainer.sharding=full or hybrid", "trainer.reduce_dtype=bfloat16", "trainer.sharding=none"),
    sft("'console' or 'wandb'", "trainer.logger=[tensorboard]"),
    sft("trainer.logger", "trainer.logger=wandb"),
    sft("belong together", "data.prompt_key=question"),
    sft("exceeds trainer.micro_tokens 512", "trainer.micro_tokens=512"),
    *each("sft", "micro_tokens: expected auto, or a whole number of at least 2, found", "trainer.micro_tokens=1",
          "trainer.micro_tokens=1.5", "trainer.micro_tokens=atuo", "trainer.micro_tokens=null"),
    sft("exceeds 1000 (trainer.sequence_parallel 2 x trainer.micro_tokens 500)", "trainer.micro_tokens=500",
        "trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2"),
    sft("trainer.sequence_parallel=3 does not divide the 4 ranks of a node", "trainer.sequence_parallel=3",
        "trainer.n_gpus_per_node=4"),
    distill("a teacher on ranks of its own evaluates whole rows: remove one of the two",
            "trainer.sequence_parallel=2", "trainer.n_gpus_per_node=4", "teacher.ranks_per_node=2"),
    sft("optim", "optim=3"),
    ppo("'auto', 'hf', 'vllm', 'sglang' or 'openai'", "rollout.name=tgi"),
    ppo("set rollout.n to 2 or more", "algorithm.advantage=grpo", "rollout.n=1"),
    ppo("actor.mini_batch_size 3 does not divide the 8 responses", "actor.mini_batch_size=3"),
    ppo("pools.roles.rollout is x", "pools.roles={rollout: x}"),
    ppo("pool a needs 8 CPU slots", "pools.spec={a: [8]}"),
    ppo("pools.spec.a", "pools.spec={a: []}"),
    ppo("num_cpus is 0", "ray_kwargs.ray_init={num_cpus: 0}"),
    ppo("ray.first_port", "ray.first_port=80"),
    Case("none", ("submit", "sft", "--nodes", "2", "--dry-run"), "submit sft --nodes 2 --dry-run model=qwen2.5-0.5b"),
    Case("none", ("submit", "ppo", "--nodes", "4", "--dry-run"), "--dry-run recipe=gsm8k-4nodes data.train_files="),
    Case("none", ("eval", "models/small", "--dry-run"), "hpc-rl eval models/small --dry-run data.files="),
    Case("none", ("config", "sft", "optim.lrr"), "did you mean optim.lr?"),
    Case("none", ("config", "ppo", "--help", "zzz"), "no key contains this word"),
]  # fmt: skip
RESOURCES = [
    *(
        sft("not a size that sbatch accepts", "--mem", size)
        for size in ("lots", "10x", "1.5G", "64 G", "64Gi", "-5", "1E", "5P", "", "99999999999999999999", "G", "0x10")
    ),
    *(
        sft("not a Slurm time", "--time", time)
        for time in ("tomorrow", "1h", "24:0", "1-", "-1", "1:2:3:4", "1.5", "", "1-100:00")
    ),
    sft("ask for more time or lower slurm.warning_s", "--time", "2"),
    sft("slurm.time", "slurm.time=[86400]"),
    sft("ask for more time", "--time", "0"),
    sft("--nodes 0: expected at least 1", "--nodes", "0"),
    sft("set trainer.device=cpu", "--gpus-per-node", "0"),
    sft("--cpus-per-task -1: expected at least 1", "--cpus-per-task", "-1"),
    sft("line break", "--account", "me\n#SBATCH --uid=0"),
    sft("line break", "--partition", "a\rb"),
    sft("line break", 'slurm.modules=["cuda\n"]'),
    sft("use --nodes", "--sbatch", "nodes=3"),
    sft("use hpc-rl sweep", "--sbatch", "array=1-3"),
    sft("use --mem", "--sbatch", "mem=3G"),
    sft("not a long option of sbatch", "--sbatch", "Exclusive"),
    sft("not a long option of sbatch", "--sbatch", "=3"),
    sft("not a long option of sbatch", "--sbatch", "-x=3"),
    sft("mem-per-cpu is 'lots'", "--sbatch", "mem-per-cpu=lots"),
    sft("write null for an option without a value", "slurm.sbatch={exclusive: true}"),
    sft("slurm.mem_option=none: leave mem out", "--mem", "64G", "slurm.mem_option=none"),
    sft("slurm.gpu_type", "slurm.gpu_type=a100:4"),
    sft("not the name of an environment variable", "slurm.env.1A=x"),
    sft("not the name of an environment variable", "slurm.env={a-b: x}"),
    sft("slurm.warning_s", "slurm.warning_s=0"),
    sft("'gpus-per-node', 'gpus-per-task' or 'gres'", "slurm.gpu_option=gpus"),
    sft("slurm.leave_out", "slurm.leave_out=[nodes]"),
    sft("slurm.node.gpus", "slurm.node.gpus=0"),
    sft("no run '12x'", "--after", "12x"),
    sft("slurm.python: ", f"slurm.python={LONG}"),
    sft("use only one of them", "--local", "--in-allocation"),
]
NAMES = [
    *(
        sft("job name", "--job-name", name)
        for name in ("-x", ".x", "a/b", "..", ".", "a b", "ä", "a;b", "$(x)", "a\\b", "a*", "/abs", "a'b", "~")
    ),
    sft("slurm.job_name", "--job-name", ""),
    sft("File name too long", "--job-name", LONG),
    sft("File name too long", "--run-dir", LONG),
    sft("File name too long", "--run-dir", "ä" * 200),
    sft("File name too long", "--run-dir", "a/" * 2040 + "b"),
    sft("symbolic links", "--run-dir", "loop"),
    sft("symbolic links", "--run-dir", "loop/run"),
    sft("train.jsonl is a file", "--run-dir", "train.jsonl/run"),
    sft("train.jsonl", "--run-dir", "train.jsonl"),
    sft("is neither empty nor a run directory", "--run-dir", "model"),
    sft("File name too long", "--script", LONG),
    Case("none", ("submit", "sft", "--script", LONG), "File name too long"),
    Case("none", ("submit", "sft", "--script", "none.sbatch"), "none.sbatch"),
    Case("none", ("submit", "sft", "--script", "train.jsonl"), "hpc-rl render did not write it"),
    *(
        Case("none", (command, LONG), "File name too long")
        for command in ("status", "logs", "stop", "cancel", "report")
    ),
    Case("none", ("status", "loop"), "no run 'loop'"),
    Case("none", ("status", "train.jsonl"), "no run 'train.jsonl'"),
]
NAMES = [case for case in NAMES if case.words != ("--script", LONG)]
PROFILES = [
    *(Case("sft", ("--site", f"{name}.site.yaml"), expected) for name, expected in (
        ("unknown", "line 1: slurm.partion: unknown key; did you mean slurm.partition?"),
        ("section", "slurmm.partition: unknown key"),
        ("type", "line 1: slurm.exclusive"),
        ("time", "YAML reads an unquoted 24:00:00 as 86400"),
        ("mem", "not a size that sbatch accepts"),
        ("infinite", "finite number"),
        ("list", "a profile has sections"),
        ("text", "a profile has sections"),
        ("open", "open.site.yaml, line 2"),
        ("tab", "tab.site.yaml, line 2"),
        ("twice", "slurm.partition"),
        ("job", "belongs to a job"),
        ("whole", "a section"),
        ("itself", "contains itself"),
        ("top", "top.site.yaml"),
        ("alias", "alias.site.yaml, line 1"),
        ("tag", "tag.site.yaml"),
        ("owned", "use --nodes"),
        ("day", "day.site.yaml, line 1"),
        ("binary", "binary.site.yaml"),
        ("folder", "folder.site.yaml"),
        ("none", "no such file"),
    )),
    Case("sft", ("--site", "nowhere"), "typed-gres"),
    Case("sft", ("--site", ""), "site profile"),
    Case("sft", ("--site", f"{LONG}.yaml"), "File name too long"),
    Case("sft", ("--site", LONG), "File name too long"),
    Case("sft", ("--site", "loop"), "site profile"),
    Case("sft", ("--site", "~nobody-here/site.yaml"), "site profile"),
    *(Case("recipe", words, expected, folder=f"projects/{folder}") for folder, words, expected in (
        ("itself", ("recipe=a",), "one of recipe/a.yaml leads back to itself"),
        ("pair", ("recipe=a",), "one of recipe/a.yaml, recipe/b.yaml leads back to itself"),
        ("absent", ("recipe=a",), "Could not load 'recipe/nowhere'"),
        ("open", (), "ppo.yaml, line 2: not valid YAML"),
        ("list", (), "ppo"),
        ("binary", (), "ppo.yaml: not UTF-8 text"),
        ("unknown", (), "configs/ppo.yaml, line 1: optimizer.lr: unknown key; did you mean actor.optim.lr?"),
        ("infinite", (), "configs/ppo.yaml, line 1: actor.optim.lr: Input should be a finite number"),
        ("nan", (), "actor.optim.lr: Input should be a finite number"),
        ("time", (), "YAML reads an unquoted 24:00:00 as 86400"),
        ("defaults", (), "defaults"),
        ("interpolation", (), "'nowhere' not found"),
        ("circular", (), "Recursive interpolation"),
        ("tag", (), "ppo.yaml, line 1"),
    )),
]  # fmt: skip
REWARDS = [
    ppo("did you mean gsm8k?", "reward.function=gsm8"),
    ppo("expected one of", "reward.function=zzz"),
    ppo("expected", "reward.function="),
    ppo("expected the form", "reward.function=:score"),
    ppo("expected the form", "reward.function=reward.py:"),
    ppo("expected the form", "reward.function=reward.py:a-b"),
    ppo("expected one of", "reward.function=reward.py"),
    ppo("did you mean score?", "reward.function=reward.py:socre"),
    ppo("it has score, other", "reward.function=reward.py:zzz"),
    ppo("did you mean", "reward.function=rewards.py:score"),
    ppo("no such file: none/where.py", "reward.function=none/where.py:score"),
    ppo("has 309 bytes; the limit is 255", f"reward.function={LONG}.py:score"),
    ppo("folder.py", "reward.function=folder.py:score"),
    ppo("line 1", "reward.function=syntax.py:score"),
    ppo("binary.py", "reward.function=binary.py:score"),
    ppo("no 'score'", "reward.function=nothing.py:score"),
    ppo("is a number", "reward.function=constant.py:score"),
    ppo("is text", "reward.function=text.py:score"),
    ppo("is a dictionary", "reward.function=table.py:score"),
    ppo("a class", "reward.function=class.py:score"),
    ppo("an async function", "reward.function=coroutine.py:score"),
    ppo("(response)", "reward.function=one.py:score"),
    ppo("threshold", "reward.function=three.py:score"),
    ppo("()", "reward.function=none.py:score"),
    ppo("scale", "reward.function=keyword.py:score"),
    ppo("unexpected keyword argument", "reward.function=reward.py:score", "reward.kwargs={a: 1}"),
    ppo("regular expression", "reward.function=format", "reward.kwargs={pattern: '('}"),
    Case("ppo", ("reward.function=no_such_module:score",), "no module 'no_such_module'", same_python=True),
    Case("ppo", ("reward.function=os.nothing:score",), "os.nothing", same_python=True),
    ppo("reward.function: required", "reward.function=null"),
    ppo("found function and url", "reward.url=http://host:1/x"),
    ppo("found function and model", "reward.model=model"),
    *(
        ppo("http://host:port/path", "reward.function=null", f"reward.url={url}")
        for url in (
            "localhost",
            "ftp://host/x",
            "http://",
            "http://host:x/",
            "http://host:0/",
            "http://a b/",
            "http://host:99999/",
        )
    ),
    *each("ppo", "greater than", "reward.timeout_s=0", "reward.workers=0"),
]
SWEEPS = [
    Case("sweep", (), "nothing to sweep"),
    Case("sweep", ("optim.lr=1e-5",), "nothing to sweep"),
    Case("sweep", ("optim.lr=1,",), "a value is empty"),
    Case("sweep", ("optim.lr=,1",), "a value is empty"),
    Case("sweep", ("optim.lr=1,,2",), "a value is empty"),
    Case("sweep", ("optim.lr=1,1",), "listed 2 times"),
    Case("sweep", ("optim.lr=1,2", "optim.lr=3,4"), "optim.lr is given 2 times"),
    Case("sweep", ("optim.betas=[0.9,0.95],[0.9",), "missing"),
    Case("sweep", ("optim.betas=0.9],[0.9",), "has no opening bracket"),
    Case("sweep", ("optim.lr='1,2",), "missing"),
    Case("sweep", ("optim.lr=1,fast",), "optim.lr: expected a number, found 'fast'"),
    Case("sweep", ("optim.lr=1,inf",), "finite number"),
    Case("sweep", ("optim.lrr=1,2",), "did you mean optim.lr?"),
    Case("sweep", ("model=qwen2.5-0.5b,qwen",), "there is no model 'qwen'"),
    Case("sweep-files", ("model.path=model,truncated", "data.train_files=train.jsonl"), "is truncated"),
    Case("sweep-files", ("model.path=model", "data.train_files=train.jsonl,none.jsonl"), "none.jsonl: no such"),
    Case("sweep", ("trainer.nnodes=1,2",), "--nodes=2"),
    Case("sweep", ("slurm.time=1:00:00,2:00:00",), "--time=2:00:00"),
    Case("sweep", (f"trainer.seed={','.join(map(str, range(1500)))}",), "the sweep has 1500 points"),
    Case("sweep", (f"trainer.seed={','.join(map(str, range(100)))}", f"optim.lr={','.join(map(str, range(1, 101)))}"),
         "the sweep has 10000 points"),
    Case("sweep", ("optim.lr=1,2", "--job-name", "a/b"), "job name"),
    Case("sweep", ("optim.lr=1,2", "--job-name", LONG), "File name too long"),
    Case("sweep", ("optim.lr=1,2", "--job-name", "n" * 254), "File name too long"),
    Case("sweep", ("optim.lr=1,2", "--job-name", "n", "--run-dir", "loop"), "symbolic links"),
]  # fmt: skip
IMAGES = [
    *(sft(expected, "--image", image) for image, expected in (
        ("none.sif", "none.sif"), ("train.jsonl", "train.jsonl"), ("other.sif", "other.sif"),
        ("short.sif", "short.sif"), ("empty.sif", "empty.sif"), ("pointer.sif", "pointer.sif"), ("loop", "loop"),
        ("empty", "empty"), (LONG, "300 bytes"), ("", "the path is empty"), ("docker://ubuntu", "docker:"),
    )),
    sft("arm64", "--image", "arm.sif", "container.arch=amd64"),
    sft("./none.sqsh", "--image", "./none.sqsh", "container.runtime=pyxis"),
    sft("SRC[:DST[:OPTIONS]]", "container.binds=[a:b]"),
    sft("SRC[:DST[:OPTIONS]]", "container.binds=[\"a,b\"]"),
    sft("SRC[:DST[:OPTIONS]]", "container.binds=[\"\"]"),
    sft("container.env", "container.env=[1A]"),
    sft("container.env", "container.env=[A*B]"),
    sft("choose one of auto, apptainer, singularity, pyxis", "container.runtime=docker"),
    sft("container.python", "container.python="),
    sft("'nv' or 'rocm'", "container.gpu=cuda"),
    Case("none", ("image", "check", "none.sif"), "none.sif"),
    Case("none", ("image", "check", "other.sif"), "other.sif"),
]  # fmt: skip
PROGRAMS = [
    Case("torchrun", (), "no program given"),
    Case("torchrun", ("--", "absent.py"), "program absent.py"),
    Case("torchrun", ("--", LONG), "File name too long"),
    Case("torchrun", ("--", "-m"), "-m needs the name of a module"),
    Case("torchrun", ("--", "python", "absent.py"), "program absent.py"),
    Case("torchrun", ("--", "torchrun", "absent.py"), "program absent.py"),
    Case("torchrun", ("--", "empty"), "program empty"),
    Case("torchrun", ("optim.lr=1", "--", "driver.py"), "optim"),
    Case("ray", (), "no program given"),
    Case("ray", ("--", "driver.py"), "write -- python driver.py"),
    Case("ray", ("--", "python", "absent.py"), "program absent.py"),
    Case("ray", ("--", "./none"), "program ./none"),
    Case("ray", ("--", f"./{LONG}"), "File name too long"),
    sft("only torchrun and ray accept a program after --", "--", "driver.py"),
]
CASES = [
    *DATA, *PREFERENCES, *STREAMS, *TEACHERS, *GENERATION, *TEMPLATES, *MODELS, *KEYS, *RESOURCES, *NAMES, *PROFILES,
    *REWARDS, *SWEEPS, *IMAGES, *PROGRAMS, *ADAPTERS,
]  # fmt: skip


class WithoutHeavy:
    """A finder of modules that hides the heavy packages, as if they were not installed."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in HEAVY else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid and broken files, which no case changes."""
    root = tmp_path_factory.mktemp("bad")
    for write in (
        bad_files.write_models, bad_files.write_data, bad_files.write_rewards, bad_files.write_images,
        bad_files.write_profiles, bad_files.write_recipes,
    ):  # fmt: skip
        write(root)
    for project in (root / "projects").iterdir():
        for name in ("model", "prompts.jsonl"):
            (project / name).symlink_to(root / name)
    return root


@pytest.fixture(scope="module")
def hydra_tree() -> Callable[..., Any]:
    """Hydra's part of a composition, remembered: it depends on these words and the folder alone, and takes 0.1 s."""
    original, found = compose._hydra_tree, {}

    def remembered(job: str, overrides: Sequence[str]) -> Any:
        key = (job, tuple(overrides), Path.cwd())
        if key not in found:
            found[key] = original(job, overrides)
        return copy.deepcopy(found[key])

    return remembered


@pytest.fixture(params=["full", "light"])
def installation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hydra_tree: Callable[..., Any]
) -> Iterator[str]:
    """Hide Slurm and the user's own profile; for `light` also the packages that only jobs need."""
    monkeypatch.setattr(compose, "_hydra_tree", hydra_tree)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HPC_RL_SITE", raising=False)
    if request.param == "light":
        for name in [name for name in sys.modules if name.partition(".")[0] in HEAVY]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [WithoutHeavy(finder) for finder in sys.meta_path])
        monkeypatch.setattr(checks, "installed_ray", lambda: None)
    yield request.param


def answer(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["hpc-rl", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def words_of(command: str, words: tuple[str, ...], installation: str) -> tuple[str, ...]:
    """A login node without the packages names the Python of the nodes."""
    start = VALID[command]
    elsewhere = ("slurm.python=/opt/nodes/bin/python",) if installation == "light" and start else ()
    return (*start, *elsewhere, *words)


ADDED = {"torchrun": ("--", "driver.py"), "ray": ("--", "python", "driver.py"), "sweep": ("optim.lr=1e-5,3e-5",)}


@pytest.mark.parametrize(
    "command", [name for name in VALID if name in ("sft", "ppo", "generate", "eval", "torchrun", "ray", "sweep")]
)
def test_the_commands_are_valid_without_the_mistakes(
    command: str, installation: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    words = words_of(command, ADDED.get(command, ()), installation)
    assert answer(words, monkeypatch) == 0, capsys.readouterr().err


def installed_cases() -> Iterator[Any]:
    """Yield each case with one of the two installations, in turn; `make test-long` has it with the other one too."""
    for number, case in enumerate(CASES):
        in_turn = "full" if case.same_python or number % 2 == 0 else "light"
        # Modules of another Python cannot be looked up.
        for installation in ("full",) if case.same_python else ("full", "light"):
            name = f"{' '.join((case.command, *case.words))[:80]}-{installation}"
            marks = () if installation == in_turn else pytest.mark.long
            yield pytest.param(case, installation, id=name, marks=marks)


@pytest.mark.parametrize(("case", "installation"), list(installed_cases()), indirect=["installation"])
def test_bad_input_is_explained(
    case: Case, installation: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files / case.folder)
    code = answer(words_of(case.command, case.words, installation), monkeypatch)
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert code == 2, shown.out + shown.err
    assert case.expected in shown.err
    assert 1 <= len(lines) <= MAX_LINES and all(line.startswith("hpc-rl: ") for line in lines), shown.err
    assert not (files / case.folder / "runs").exists()


def test_there_are_many_cases() -> None:
    assert len({(case.command, case.words, case.folder) for case in CASES}) >= 230


@pytest.mark.parametrize("points", [1500, 10_000])
def test_a_sweep_over_the_limit_composes_none_of_its_points(
    points: int, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    composed: list[object] = []

    def compose_each(kind: str, words: Any, each: Any, *more: Any) -> list[JobConfig]:
        composed.extend(each)
        return real(kind, words, each, *more)

    real = sweep.compose_each
    monkeypatch.setattr(sweep, "compose_each", compose_each)
    monkeypatch.setenv("PATH", str(files))
    monkeypatch.chdir(files)
    assert answer((*VALID["sweep"], f"trainer.seed={','.join(map(str, range(points)))}"), monkeypatch) == 2
    assert f"the sweep has {points} points" in capsys.readouterr().err
    assert composed == [()], "one composition, which names the cluster"


@pytest.mark.parametrize(
    "words",
    [
        (*VALID["sft"], "optim.lr=inf"),
        (*VALID["sft"], "model.path=truncated"),
        (*VALID["ppo"], "--job-name", LONG),
        ("submit", "sft", "--nodes", "2"),
        ("status", LONG),
    ],
    ids=["number", "model", "name", "missing", "status"],
)
def test_bad_input_of_a_process_has_no_traceback(words: tuple[str, ...], files: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "hpc_rl.cli", *words]
    done = subprocess.run(command, cwd=files, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert 1 <= len(done.stderr.splitlines()) <= MAX_LINES and "Traceback" not in done.stderr
