"""What fits the schema key by key and cannot work together."""

from __future__ import annotations

import pytest

from hpc_rl.config.rl.pools import pool_of, pool_spec
from hpc_rl.errors import UserError
from tests.rl.ppo_config import STALE, ppo_config

GRPO = "algorithm.advantage=grpo"
TWO_GPUS = "trainer.n_gpus_per_node=2"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ("actor.mini_batch_size=3",),
            "actor.mini_batch_size 3 does not divide the 8 responses of a step (data.train_batch_size 4 x rollout.n 2):"
            " the nearest that do are 2 and 4",
        ),
        (
            ("actor.mini_batch_size=9",),
            "actor.mini_batch_size 9 does not divide the 8 responses of a step (data.train_batch_size 4 x rollout.n 2):"
            " the largest that does is 8",
        ),
        (
            ("data.train_batch_size=250", "rollout.n=8", "actor.mini_batch_size=512"),
            "actor.mini_batch_size 512 does not divide the 2000 responses of a step (data.train_batch_size 250 x "
            "rollout.n 8): the nearest that do are 500 and 1000",
        ),
        *(
            (("actor.shuffle=true", f"actor.mini_batch_size={size}"), "actor.shuffle has no effect: all 8 responses of")
            for size in ("null", "8")
        ),
        (
            ("trainer.micro_tokens=519",),
            "data.max_prompt_length 512 + data.max_response_length 8 exceeds trainer.micro_tokens 519: a sample is "
            "never split, so raise micro_tokens or lower the lengths",
        ),
        (
            ("trainer.micro_tokens=259", "trainer.sequence_parallel=2", TWO_GPUS),
            "data.max_prompt_length 512 + data.max_response_length 8 exceeds 518 (trainer.sequence_parallel 2 x "
            "trainer.micro_tokens 259): a sample is never split, so raise micro_tokens or lower the lengths",
        ),
        (
            ("trainer.sequence_parallel=3", TWO_GPUS),
            "trainer.sequence_parallel=3 does not divide the ranks of each node of pool global_pool: 2; use a divisor "
            "of their numbers, or another pools.spec",
        ),
        (("algorithm.overlong_buffer=9",), "algorithm.overlong_buffer 9 exceeds data.max_response_length 8: lower it"),
        *(
            (
                (f"algorithm.advantage={name}", "rollout.n=1"),
                f"algorithm.advantage={name} compares responses to the same prompt, but rollout.n is 1: set rollout.n "
                "to 2 or more",
            )
            for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
        ),
        (
            ("algorithm.filter_groups=true", "rollout.n=1"),
            "algorithm.filter_groups compares responses to the same prompt, but rollout.n is 1",
        ),
        (
            ("algorithm.filter_groups=true", "algorithm.advantage=remax"),
            "algorithm.filter_groups needs several responses per prompt, and algorithm.advantage=remax uses one and a "
            "greedy one: choose another estimator, or set filter_groups=false",
        ),
        (
            ("algorithm.kl={where: loss, estimator: k3, target: 1}",),
            "algorithm.kl.target adapts the KL penalty in the reward: set algorithm.kl.where=reward",
        ),
        (
            ("algorithm.kl.where=loss",),
            "algorithm.kl.estimator=k1 has no gradient on average: with kl.where=loss use k2, k3 or k3+",
        ),
        (
            ("algorithm.loss=cispo",),
            "algorithm.clip_ratio_low is 0.2, but algorithm.loss=cispo has no lower bound: use the preset "
            "algorithm=cispo, or set algorithm.clip_ratio_low=1",
        ),
        (
            ("algorithm.scale_rewards=batch",),
            "algorithm.scale_rewards has no effect with algorithm.advantage=gae: use algorithm.advantage=grpo, or",
        ),
        (
            ("algorithm.tis_bounds=[2,0.5]",),
            "algorithm.tis_bounds is [2, 0.5]: give two ratios of at least 0, the lower one first",
        ),
        (
            ("reward.function=null", "reward.functions=[exact,gsm8k]", "reward.weights=[1]"),
            "reward.weights has 1 numbers for 2 reward.functions: give one for each",
        ),
        (
            ("reward.weights=[1]",),
            "reward.weights has 1 numbers for 0 reward.functions: give one for each",
        ),
        (
            ("reward.function=null", "reward.functions=[exact,exact]"),
            "reward.functions [exact, exact] has a name twice: name each function once",
        ),
        (
            ("reward.function=null", "reward.functions=[exact,format]", "reward.kwargs.pattern=x"),
            "reward.kwargs.pattern: with reward.functions, write a table for each function, such as "
            "'reward.kwargs={exact: {NAME: VALUE}, format: {NAME: VALUE}}'",
        ),
        (
            ("reward.clip=[1,1]",),
            "reward.clip is [1, 1]: put the lower number first",
        ),
        (
            ("rollout.val.n=4",),
            "rollout.val.n is 4, but at rollout.val.temperature=0 all responses are the same: raise the temperature",
        ),
        (
            ("rollout.val.top_p=0.9",),
            "rollout.val.top_p=0.9 has no effect at rollout.val.temperature=0, which always takes the most probable "
            "token: raise the temperature, or remove it",
        ),
        (
            ("algorithm.tis_level=sequence",),
            "algorithm.tis_level=sequence has no effect without a correction: set algorithm.tis_cap or "
            "algorithm.tis_bounds, or remove it",
        ),
        (
            ("critic.warmup_steps=5", "trainer.total_training_steps=5"),
            "critic.warmup_steps 5 leaves the policy none of the trainer.total_training_steps 5",
        ),
        (
            ("pools={spec: {train: [8, 8]}}", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"),
            "pool train needs 8 + 8 CPU slots; the job has 2 x 4 (trainer.nnodes x trainer.n_gpus_per_node), and each "
            "entry of a pool has to be on one node",
        ),
        (
            ("pools={spec: {train: [2], judge: [1]}, roles: {critic: judge}}", TWO_GPUS),
            "pool train needs 2 CPU slots; pool judge needs 1 CPU slots; the job has 1 x 2 (trainer.nnodes x "
            "trainer.n_gpus_per_node), and each entry of a pool has to be on one node",
        ),
        (
            ("pools={spec: {train: [4]}}", TWO_GPUS, "trainer.nnodes=2", "trainer.device=cuda"),
            "pool train needs 4 GPUs; the job has 2 x 2 (trainer.nnodes x trainer.n_gpus_per_node), and each entry "
            "of a pool has to be on one node",
        ),
        (
            ("pools={spec: {train: [1], engines: [1]}, roles: {rollout: engine}}", TWO_GPUS),
            "pools.roles.rollout is engine, which is not one of the pools: train, engines",
        ),
        (
            ("pools={spec: {train: [1], spare: [1]}}", TWO_GPUS),
            "pool spare has no role: name it in pools.roles, or leave it out",
        ),
        (
            ("rollout.tensor_parallel_size=2",),
            "rollout.tensor_parallel_size is 2, which rollout.name=hf does not support: set rollout.name=vllm, or "
            "rollout.tensor_parallel_size=1",
        ),
        (
            ("rollout={name: vllm, tensor_parallel_size: 2}", "trainer.n_gpus_per_node=3", "trainer.device=cuda"),
            "rollout.tensor_parallel_size 2 does not divide the 3 GPUs per node of pool global_pool",
        ),
        (
            ("rollout={name: vllm, tensor_parallel_size: 2}", TWO_GPUS, "pools.strategy=PACK"),
            "pools.strategy=PACK may place the 2 GPUs of an engine on several nodes: use STRICT_PACK",
        ),
        (
            ("rollout.staleness=1", TWO_GPUS),
            "rollout.staleness=1 generates and trains at the same time, so engines need a pool of their own, but "
            "actor, critic and rollout share the 2 CPU slots of pool global_pool: set, for example, "
            "pools.spec='{train: [1], rollout: [1]}' and pools.roles.rollout=rollout",
        ),
        (
            ("rollout.staleness=1", "trainer.nnodes=5", "trainer.n_gpus_per_node=8", "trainer.device=cuda"),
            "pools.spec='{train: [8, 8, 8], rollout: [8, 8]}' and pools.roles.rollout=rollout",
        ),
        (
            ("rollout.staleness=1", "trainer.n_gpus_per_node=5", "trainer.device=cuda"),
            "pools.spec='{train: [3], rollout: [2]}' and pools.roles.rollout=rollout",
        ),
        (
            ("rollout.staleness=1",),
            "they need at least 2 CPU slots, and the job has 1; raise trainer.n_gpus_per_node",
        ),
        (
            ("rollout.staleness=1", "rollout.calculate_log_probs=true", *STALE),
            "rollout.calculate_log_probs with rollout.staleness=1 needs the log-probabilities of a correction: set "
            "algorithm.tis_cap=2, or remove rollout.calculate_log_probs",
        ),
        (
            ("rollout={staleness: 1, name: vllm, top_p: 0.9, temperature: 0.7}", *STALE),
            "rollout.staleness=1 with rollout.top_p or top_k and rollout.temperature=0.7: vLLM reports the "
            "probabilities of the truncated distribution, and the trainer would compare them with those of all tokens; "
            "set algorithm.tis_cap=2, or remove top_p and top_k, or the temperature",
        ),
        (
            ("rollout.partial=true",),
            "rollout.partial=true has no effect with rollout.staleness=0: all responses of a step are complete before "
            "its update; set rollout.staleness, or remove it",
        ),
        (
            ("rollout={staleness: 1, partial: true, merge_lora: false, name: vllm}", "model.lora.rank=8", *STALE),
            "rollout.partial=true with rollout.merge_lora=false: vLLM finishes a response with the adapters that it "
            "began with; remove one of them",
        ),
        (
            ("reward.model=/reward",),
            "reward.functions, reward.model and reward.url, found function and model",
        ),
        (("reward.function=null",), "reward.function: required, but not given"),
        (("rollout.temperature=0",), "rollout.temperature: Input should be greater than 0, found 0"),
        (("algorithm.clip_ratio_c=1",), "algorithm.clip_ratio_c: Input should be greater than 1, found 1"),
        (("algorithm.advantage=ppo",), "algorithm.advantage: Input should be 'gae', 'grpo', 'dr_grpo', 'rloo'"),
        (("pools.roles.judge=train",), "pools.roles.judge"),
        (("ray_kwargs.ray_init.num_cpus=0",), "num_cpus is 0; expected a whole number of CPUs, at least 1"),
        (("algorithm.kl_coef=0.1",), "algorithm.kl_coef: unknown key; did you mean algorithm.kl.coef?"),
    ],
)
def test_what_is_wrong_is_said(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ppo_config(*overrides)
    assert any(line.startswith(message) or line.endswith(message) for line in str(caught.value).splitlines()), str(
        caught.value
    )


def test_the_arguments_of_an_own_function_beside_others_can_be_written_as_the_message_shows() -> None:
    functions = ("reward.function=null", "reward.functions=[exact,my/r.py:score]")
    with pytest.raises(UserError) as caught:
        ppo_config(*functions, "reward.kwargs.bonus=5")
    shown = r"reward.kwargs={exact: {NAME: VALUE}, my/r.py\:score: {NAME: VALUE}}"
    assert str(caught.value).endswith(f"such as '{shown}'")
    config = ppo_config(*functions, shown.replace("NAME: VALUE", "bonus: 5"))
    assert config.reward.kwargs == {"exact": {"bonus": 5}, "my/r.py:score": {"bonus": 5}}


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as caught:
        ppo_config(GRPO, "rollout.n=1", "actor.mini_batch_size=3", "rollout.tensor_parallel_size=2")
    lines = str(caught.value).splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        "actor.mini_batch_size",
        "rollout.tensor_parallel_size",
        "algorithm.advantage=grpo",
    ]


def test_roles_are_those_that_the_algorithm_needs() -> None:
    assert ppo_config().roles == ["actor", "critic", "rollout"]
    assert ppo_config(GRPO).roles == ["actor", "rollout"]
    everything = ppo_config("algorithm.kl.where=reward", "reward.function=null", "reward.model=/reward")
    assert everything.roles == ["actor", "critic", "ref", "reward", "rollout"]


def test_one_pool_of_all_nodes_unless_told_otherwise() -> None:
    config = ppo_config("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    assert pool_spec(config) == {"global_pool": [8, 8]}
    assert {pool_of(config, role) for role in config.roles} == {"global_pool"}


def test_roles_without_a_pool_are_in_the_first_one() -> None:
    config = ppo_config("pools={spec: {train: [1], engines: [1]}, roles: {rollout: engines}}", TWO_GPUS)
    assert {role: pool_of(config, role) for role in config.roles} == {
        "actor": "train",
        "critic": "train",
        "rollout": "engines",
    }


@pytest.mark.parametrize(
    ("hang", "reward", "expected"), [(900, 450, 900), (900, 451, 902), (900, 10, 900), (0, 451, 0)]
)
def test_nothing_hangs_while_one_reward_is_slow(hang: int, reward: int, expected: float) -> None:
    config = ppo_config(f"trainer.hang_timeout_s={hang}", f"reward.timeout_s={reward}")
    assert config.hang_timeout_s == expected
