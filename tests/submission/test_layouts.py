"""Layouts of GPUs that cannot work: refused before the queue, with the numbers that do not fit and a way out."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.pools import can_be_even
from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import VOCABULARY_BLOCK, refuse_unsplittable_engine
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.local import check_local
from tests.helpers import hpc_rl, make_tiny_model
from tests.rl.ppo_config import ppo_config

GPUS = ("trainer.device=cuda", "rollout.name=vllm")
FOUR = (*GPUS, "trainer.n_gpus_per_node=4")
HYBRID = "trainer.sharding=hybrid"
APART = "pools.roles={rollout: engines}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*FOUR, "rollout.tensor_parallel_size=3"),
            "rollout.tensor_parallel_size 3 does not divide the 4 GPUs per node of pool global_pool: choose a number "
            "that does",
        ),
        (
            (*FOUR, "rollout.tensor_parallel_size=2", "pools.spec={train: [1], engines: [3]}", APART),
            "rollout.tensor_parallel_size 2 does not divide the 3 GPUs per node of pool engines: choose a number that "
            "does",
        ),
        (
            (*FOUR, "rollout.tensor_parallel_size=8"),
            "rollout.tensor_parallel_size 8 does not divide the 4 GPUs per node of pool global_pool: choose a number "
            "that does",
        ),
        (
            (*FOUR, "trainer.nnodes=2", HYBRID, "pools.spec={train: [3, 1], engines: [1, 3]}", APART),
            "trainer.sharding=hybrid needs the same number of ranks on each node, and pool train has 3 + 1 GPUs on 2 "
            "nodes of 4: use entries of one size in pools.spec, the same number of them on each node, or "
            "trainer.sharding=full",
        ),
        (
            (*FOUR, "trainer.sequence_parallel=2", "pools.spec={train: [3], engines: [1]}", APART),
            "trainer.sequence_parallel=2 does not divide the ranks of each node of pool train: 3; use a divisor of "
            "their numbers, or another pools.spec",
        ),
        (
            (*FOUR, "pools.spec={train: [4], engines: [1]}", APART),
            "pool train needs 4 GPUs; pool engines needs 1 GPUs; the job has 1 x 4 (trainer.nnodes x "
            "trainer.n_gpus_per_node), and each entry of a pool has to be on one node",
        ),
        (
            (*FOUR, "rollout.name=hf", "rollout.tensor_parallel_size=2"),
            "rollout.tensor_parallel_size is 2, which rollout.name=hf does not support: set rollout.name=vllm, or "
            "rollout.tensor_parallel_size=1",
        ),
        (
            (*FOUR, "+rollout.engine_kwargs.tensor_parallel_size=2"),
            "rollout.engine_kwargs.tensor_parallel_size=2: hpc-rl sets this argument of vllm itself; remove it, and "
            "set rollout.tensor_parallel_size",
        ),
        *(
            (
                (*FOUR, f"+rollout.engine_kwargs.{name}=2"),
                f"rollout.engine_kwargs.{name}=2: an engine of vllm has 1 of the job's GPUs "
                "(rollout.tensor_parallel_size), and no more are reserved for it: remove the argument; further GPUs "
                "of the pool get engines of their own",
            )
            for name in ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
        ),
        (
            (*FOUR, "rollout.name=sglang", "rollout.engine_kwargs={tp-size: 2}"),
            "rollout.engine_kwargs.tp_size=2: an engine of sglang has 1 of the job's GPUs "
            "(rollout.tensor_parallel_size), and no more are reserved for it: remove the argument; further GPUs of "
            "the pool get engines of their own",
        ),
        *(
            (
                (*FOUR, f"+rollout.engine_kwargs.{name}={value}"),
                f"rollout.engine_kwargs.{name}={shown}: the engines need the policy's new weights in each step, and "
                "an engine with this argument cannot receive them: remove the argument (submit generate and eval can "
                "use it)",
            )
            for name, value, shown in (("quantization", "fp8", "fp8"), ("enable_expert_parallel", "true", "True"))
        ),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_work_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ppo_config(*overrides)
    assert message in str(caught.value).splitlines()


@pytest.mark.parametrize(
    "overrides",
    [
        (*FOUR, "rollout.tensor_parallel_size=2"),
        (*FOUR, "rollout.tensor_parallel_size=2", "pools.spec={train: [2], engines: [2]}", APART),
        (*FOUR, "pools.spec={train: [3], engines: [1]}", APART, "trainer.sharding=hybrid"),
        (*FOUR, "trainer.nnodes=2", "trainer.sharding=hybrid", "pools.spec={train: [3, 3], engines: [1, 1]}", APART),
        (*FOUR, "trainer.nnodes=2", "trainer.sharding=full", "pools.spec={train: [3, 1], engines: [1, 3]}", APART),
        (*FOUR, "+rollout.engine_kwargs={pipeline_parallel_size: 1, quantization: null, enforce_eager: true}"),
        (*FOUR, "+rollout.engine_kwargs={enable_expert_parallel: false}"),
    ],
)
def test_a_layout_that_works_is_accepted(overrides: tuple[str, ...]) -> None:
    ppo_config(*overrides)


@pytest.mark.parametrize(
    ("sizes", "nodes", "slots", "is_even"),
    [
        ([3, 1], 2, 4, False),
        ([3, 1], 1, 4, True),
        ([4, 2, 2], 3, 4, False),
        ([8, 8], 2, 8, True),
        ([2, 2, 2], 2, 4, False),
        ([2, 2, 2], 3, 4, True),
        ([2, 2, 2, 2], 2, 4, True),
        ([3, 3, 3, 3], 2, 4, False),
    ],
)
def test_which_pools_have_as_many_ranks_on_each_node(sizes: list[int], nodes: int, slots: int, is_even: bool) -> None:
    assert can_be_even(sizes, nodes, slots) == is_even


def shape(**changes: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 16, None),
        ({"num_key_value_heads": 2}, 8, None),  # key heads are copied
        ({}, 3, "divide the 16 query heads and the 8 key heads and the 151,936 padded rows .*: use one of 1, 2, 4, 8$"),
        ({"num_attention_heads": 14, "num_key_value_heads": 2}, 4, "the 14 query heads of .*: use one of 1, 2$"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "the 4 key heads .*: use one of 1, 2, 4$"),
        ({"intermediate_size": 1026}, 4, "the 1,026 inner dimensions of an MLP of model.path m: use one of 1, 2$"),
        ({"vocab_size": 100_000}, 8, None),  # padded to 100,032
        ({"num_attention_heads": 10, "num_key_value_heads": 10, "intermediate_size": 50}, 5, "padded rows"),
        ({"intermediate_size": 1026, "moe_intermediate_size": 768}, 4, None),  # no layer has a usual MLP
        ({"intermediate_size": 1026, "moe_intermediate_size": 768, "mlp_only_layers": [1]}, 4, "the 1,026 inner"),
        ({"intermediate_size": 1026, "moe_intermediate_size": 768, "decoder_sparse_step": 2}, 4, "the 1,026 inner"),
        ({"moe_intermediate_size": 770}, 4, "the 770 inner dimensions of an expert"),
        ({"shared_expert_intermediate_size": 770}, 4, "the 770 inner dimensions of the shared expert"),
        ({"num_key_value_heads": 3, "kv_lora_rank": 512}, 2, None),
        ({"text_config": shape(num_attention_heads=14)}, 4, "the 14 query heads"),
    ],
)  # fmt: skip
def test_which_models_an_engine_can_split(changes: Mapping[str, Any], size: int, message: str | None) -> None:
    if message is None:
        refuse_unsplittable_engine("model.path", "m", shape(**changes), size)
    else:
        with pytest.raises(UserError, match=message):
            refuse_unsplittable_engine("model.path", "m", shape(**changes), size)


@pytest.mark.slow
def test_the_rules_of_splitting_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own layers are made for models of random shapes, as rank 0 of an engine of many GPUs."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    draw, outcomes = random.Random(1), set()
    with set_current_vllm_config(VllmConfig()), torch.device("meta"):
        for _ in range(60):
            size, keys = draw.randint(2, 8), draw.randint(1, 8)
            heads, inner, vocabulary = keys * draw.randint(1, 4), draw.randint(1, 6) * 12, draw.randint(65, 700)
            monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=size, rank_in_group=0))
            try:
                linear.QKVParallelLinear(64, 8, heads, keys, bias=False)
                linear.MergedColumnParallelLinear(64, [inner, inner], bias=False)
                vocab_parallel_embedding.VocabParallelEmbedding(vocabulary, 64)
                is_split = True
            except AssertionError:
                is_split = False
            found = shape(
                num_attention_heads=heads, num_key_value_heads=keys, intermediate_size=inner, vocab_size=vocabulary
            )
            try:
                refuse_unsplittable_engine("model.path", "m", found, size)
                assert is_split, (found, size)
            except UserError:
                assert not is_split, (found, size)
            outcomes.add(is_split)
    assert outcomes == {True, False}
    assert vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE == VOCABULARY_BLOCK


def test_a_machine_with_fewer_gpus_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(gpus: int, device: str = "cuda") -> None:
        config = compose(
            "torchrun", [f"trainer.device={device}", f"trainer.n_gpus_per_node={gpus}", "trainer.nnodes=2"]
        )
        check_local(Job("torchrun", config, RunDir(tmp_path), tmp_path, ("x.py",)))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    check(1)
    check(2, "cpu")
    message = r"the job needs 4 GPUs \(trainer\.nnodes 2 x .* 2\), and this shell may use 3 .*CUDA_VISIBLE_DEVICES"
    with pytest.raises(UserError, match=message):
        check(2)


def test_the_command_ends_with_code_2_and_the_numbers(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", hidden=96, num_attention_heads=6, num_key_value_heads=3)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    options = "model.path=model data.train_files=train.jsonl reward.function=exact data.train_batch_size=1 rollout.n=2"
    gpus = "trainer.device=cuda rollout.name=vllm rollout.tensor_parallel_size=4 --gpus-per-node 4 --dry-run"
    more = ["slurm.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "actor.mini_batch_size=1"]
    done = hpc_rl("submit", "ppo", *options.split(), *gpus.split(), *more, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "rollout.tensor_parallel_size=4 does not divide the 6 query heads and the 3 key heads" in done.stderr
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: rollout engines" in done.stderr
    assert "Traceback" not in done.stderr
