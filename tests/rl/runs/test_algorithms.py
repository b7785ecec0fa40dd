"""Every algorithm by changing options of the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.timeline import read_timeline
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.rl.runs.jobs import Runs, metrics, series
from tests.tracking.runs import plot_titles

ALWAYS = {
    *("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy", "actor/grad_norm", "actor/lr"),
    *("critic/score/mean", "critic/rewards/mean", "critic/advantages/mean"),
    *("response_length/mean", "response_length/max", "response_length/min", "response_length/clip_ratio"),
}
CRITIC = {"critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm", "critic/lr", "critic/values/mean"}
PHASES = ("step", "gen", "carry", "reward", "adv", "update_actor", "update_weights")
CLOCKS = {f"timing_s/{phase}" for phase in PHASES}
SPEEDS = {"perf/throughput", "perf/total_num_tokens", "perf/time_per_step"}


@pytest.mark.parametrize(
    "advantage", ["gae", "grpo", "remax", *map(long, ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"))]
)
def test_every_estimator(run: Runs, tmp_path: Path, advantage: str) -> None:
    assert run(tmp_path, f"algorithm.advantage={advantage}") == 0
    found = metrics(tmp_path)
    assert len(found) == 2
    for step in found:
        assert step.keys() >= ALWAYS
        assert step.keys() & CRITIC == (CRITIC if advantage == "gae" else set())
        assert step["actor/grad_norm"] > 0
        assert 0 < step["actor/entropy"] < 5.8  # ln 320, that of a uniform choice
    for name in CLOCKS | SPEEDS:
        assert len(series(tmp_path, name)) == 2, name


@pytest.mark.parametrize(
    "advantage, loss", [("gae", "gspo"), long("grpo", "gspo"), long("gae", "cispo"), ("grpo", "cispo")]
)
def test_every_loss(run: Runs, tmp_path: Path, advantage: str, loss: str) -> None:
    bounds = ("algorithm.clip_ratio_low=1", "algorithm.clip_ratio_high=4") if loss == "cispo" else ()
    assert run(tmp_path, f"algorithm.advantage={advantage}", f"algorithm.loss={loss}", *bounds) == 0
    assert all(step["actor/grad_norm"] > 0 for step in metrics(tmp_path))


@pytest.mark.parametrize(
    "loss_agg", [long("seq-mean-token-mean"), long("seq-mean-token-sum"), "seq-mean-token-sum-norm"]
)
def test_every_aggregation(run: Runs, tmp_path: Path, loss_agg: str) -> None:
    assert run(tmp_path, f"algorithm.loss_agg={loss_agg}") == 0
    assert all(step["actor/grad_norm"] > 0 for step in metrics(tmp_path))


@pytest.mark.parametrize("advantage", ["gae", long("rloo")])
def test_kl_in_the_reward(run: Runs, tmp_path: Path, advantage: str) -> None:
    assert run(tmp_path, f"algorithm.advantage={advantage}", "algorithm.kl={where: reward, coef: 0.5}") == 0
    first, second = metrics(tmp_path)
    assert first["critic/rewards/mean"] == pytest.approx(first["critic/score/mean"], abs=1e-5)
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)  # the policy is the reference still
    penalty = second["critic/score/mean"] - second["critic/rewards/mean"]
    assert penalty == pytest.approx(0.5 * second["actor/reward_kl_penalty"], abs=1e-5) and penalty != 0
    assert [step["actor/kl_coef"] for step in (first, second)] == [0.5, 0.5]
    assert len(series(tmp_path, "timing_s/ref")) == 2
    timeline = read_timeline(RunDir(tmp_path).timeline, 2)
    assert timeline is not None and timeline.step == 2
    models = {"ref", "update_actor", *(["values", "update_critic"] if advantage == "gae" else [])}
    assert set(timeline.phases) - {"save_checkpoint", "testing"} == {"gen", "reward", "adv", "update_weights"} | models


def test_an_adaptive_kl_weight_moves_to_its_target(run: Runs, tmp_path: Path) -> None:
    kl = "algorithm.kl={where: reward, coef: 0.1, target: 5.0, horizon: 16}"
    assert run(tmp_path, kl, "trainer.total_training_steps=3") == 0
    # Far below the target: 20 % less after each 16 responses.
    assert series(tmp_path, "actor/kl_coef") == pytest.approx([0.1, 0.08, 0.064])


@pytest.mark.parametrize("estimator", [long("k2"), long("k3"), "k3+"])
def test_kl_in_the_loss(run: Runs, tmp_path: Path, estimator: str) -> None:
    assert run(tmp_path, f"algorithm.kl={{where: loss, estimator: '{estimator}', coef: 0.1}}") == 0
    for step in metrics(tmp_path):
        assert step["actor/kl_loss"] > 0  # from the second mini-batch on
        assert "actor/reward_kl_penalty" not in step
        assert step["critic/rewards/mean"] == pytest.approx(step["critic/score/mean"])


def test_entropy_bonus_unclipped_values_and_no_dual_clip(run: Runs, tmp_path: Path) -> None:
    options = ("algorithm.entropy_coeff=0.1", "critic.cliprange_value=null", "algorithm.clip_ratio_c=null")
    assert run(tmp_path, *options, "algorithm.clip_ratio_high=0.28") == 0
    assert [step["critic/vf_clipfrac"] for step in metrics(tmp_path)] == [0, 0]


def test_one_update_per_step_needs_no_old_logprobs(run: Runs, tmp_path: Path) -> None:
    one = ("actor.mini_batch_size=null", "actor.ppo_epochs=1", "algorithm.advantage=grpo")
    assert run(tmp_path, *one) == 0
    assert [step["actor/ppo_kl"] for step in metrics(tmp_path)] == [0, 0]
    assert not series(tmp_path, "timing_s/old_log_prob")


def test_old_logprobs_may_be_the_engines_or_the_trainers(run: Runs, tmp_path: Path) -> None:
    """On a CPU both are the same float32 numbers, so that it is one forward pass less."""
    for name, more in (("engine", ()), ("trainer", ("rollout.calculate_log_probs=true",))):
        assert run(tmp_path / name, "rollout.temperature=0.7", "trainer.total_training_steps=3", *more) == 0
    recomputed = tmp_path / "trainer"
    assert len(series(recomputed, "timing_s/old_log_prob")) == 3
    for name in ("actor/pg_loss", "actor/ppo_kl", "critic/vf_loss"):
        assert series(tmp_path / "engine", name) == pytest.approx(series(recomputed, name), abs=1e-4), name
    for of in ("mean", "max", "std"):
        assert max(series(recomputed, f"training/rollout_probs_diff_{of}")) < 1e-4


def test_engine_and_trainer_choose_the_same_rotary_embedding(run: Runs, tmp_path: Path) -> None:
    """By the room of 46 tokens, and not by the length of a sample."""
    original = {"original_max_position_embeddings": 45}
    rotary = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], **original}
    settings = {**original, "rope_parameters": rotary, "num_attention_heads": 4, "initializer_range": 0.3}
    model = make_tiny_model(tmp_path / "model", kind="phi3", bos_token_id=1, **settings)
    options = ("rollout.calculate_log_probs=true", "algorithm.kl={where: reward, coef: 0.1}")
    assert run(tmp_path / "run", f"model.path={model}", *options) == 0
    assert max(series(tmp_path / "run", "training/rollout_probs_diff_max")) < 1e-4
    assert series(tmp_path / "run", "actor/reward_kl_penalty")[0] == pytest.approx(
        0, abs=1e-4
    )  # of policy and reference


def test_truncated_importance_sampling(run: Runs, tmp_path: Path) -> None:
    """A cap of 0.5 halves every token's weight, and so every gradient, if engine and trainer agree."""
    one = ("actor.mini_batch_size=null", "actor.ppo_epochs=1", "algorithm.advantage=grpo")
    for name, more in (("plain", ()), ("capped", ("algorithm.tis_cap=0.5",)), ("uncapped", ("algorithm.tis_cap=2",))):
        assert run(tmp_path / name, *one, "trainer.total_training_steps=1", *more) == 0
    plain, capped, uncapped = (
        series(tmp_path / name, "actor/grad_norm")[0] for name in ("plain", "capped", "uncapped")
    )
    assert capped == pytest.approx(plain / 2, rel=1e-3)
    assert uncapped == pytest.approx(plain, rel=1e-3)


def test_tokens_beyond_the_bounds_do_not_count(run: Runs, tmp_path: Path) -> None:
    """Engine and trainer agree, so that no ratio is above 1.5."""
    one = ("actor.mini_batch_size=null", "algorithm.advantage=grpo", "trainer.total_training_steps=1")
    assert run(tmp_path, *one, "algorithm.tis_bounds=[1.5,2]", "algorithm.tis_level=sequence") == 0
    assert series(tmp_path, "actor/grad_norm") == [0.0]


def test_truncated_sampling_is_corrected_by_what_the_engine_drew_from(run: Runs, tmp_path: Path) -> None:
    """Of the four best tokens, each is drawn more often than the policy without a limit would."""
    one = ("actor.mini_batch_size=null", "algorithm.advantage=grpo", "trainer.total_training_steps=1")
    plain, capped = tmp_path / "plain", tmp_path / "capped"
    assert run(plain, *one, "rollout.top_k=4") == 0
    assert run(capped, *one, "rollout.top_k=4", "algorithm.tis_cap=2", "rollout.calculate_log_probs=true") == 0
    assert 0 < series(capped, "actor/grad_norm")[0] < series(plain, "actor/grad_norm")[0] / 2
    assert not series(capped, "training/rollout_probs_diff_mean")


def test_dynamic_sampling(run: Runs, tmp_path: Path) -> None:
    """A batch's prompts without differing scores are replaced, so a step's responses are as many as without."""
    options = ("algorithm.advantage=grpo", "rollout.n=2", "algorithm.max_gen_batches=50")
    assert run(tmp_path / "all", *options) == 0
    assert run(tmp_path / "mixed", *options, "algorithm.filter_groups=true") == 0
    # One of two is right in every group that is kept, and wrong the other.
    assert series(tmp_path / "mixed", "critic/score/mean") == [0.5, 0.5]
    assert series(tmp_path / "all", "critic/score/mean") != [0.5, 0.5]


def test_dynamic_sampling_gives_up(run: Runs, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"of 8 prompts .2 batches of 4, .*, only 0 had responses with different"):
        run(tmp_path, "algorithm.filter_groups=true", "algorithm.max_gen_batches=2", "reward.kwargs={pattern: '.*'}")


def test_overlong_responses_are_punished(run: Runs, tmp_path: Path) -> None:
    always = "reward.kwargs={pattern: '.*'}"
    assert run(tmp_path, always, "algorithm.overlong_buffer=2", "algorithm.overlong_penalty=3") == 0
    for step in metrics(tmp_path):
        assert step["response_length/max"] == 6 and step["critic/score/min"] == 1 - 3
        assert step["critic/score/max"] <= 1


def test_the_critic_warms_up_alone(run: Runs, tmp_path: Path) -> None:
    assert run(tmp_path, "critic.warmup_steps=1") == 0
    assert len(series(tmp_path, "critic/vf_loss")) == 2
    assert len(series(tmp_path, "actor/pg_loss")) == 1


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other weights than the policy's, and strong preferences."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path_factory.mktemp("teacher") / "teacher", hidden=48)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder)
    return folder


def test_on_policy_distillation_needs_no_reward(run: Runs, tmp_path: Path, teacher: Path) -> None:
    """The policy comes closer to the teacher, whose log-probabilities are the only signal."""
    options = ("algorithm.advantage=opd", "reward.function=null", "reward.kwargs={}", f"teacher.path={teacher}")
    one = ("rollout.n=16", "actor.mini_batch_size=null", "actor.ppo_epochs=1", "trainer.val_before_train=true")
    steps = ("trainer.total_training_steps=20", "actor.optim.lr=5e-3", "actor.optim.lr_scheduler=constant")
    assert run(tmp_path, *options, *one, *steps) == 0
    found = series(tmp_path, "actor/teacher_kl")
    assert len(found) == len(series(tmp_path, "timing_s/teacher")) == 20
    assert "KL to the teacher" in plot_titles(tmp_path)
    assert found[0] > 0 and sum(found[-5:]) < 0.96 * sum(found[:5])
    expected = [-divergence for divergence in found]
    assert series(tmp_path, "critic/advantages/mean") == pytest.approx(expected, abs=1e-5)
    assert not [name for step in metrics(tmp_path) for name in step if "score" in name or "rewards" in name]


def test_a_teacher_is_added_to_a_reward(run: Runs, tmp_path: Path, teacher: Path) -> None:
    one = ("actor.mini_batch_size=null", "algorithm.advantage=grpo", "trainer.total_training_steps=1")
    assert run(tmp_path / "plain", *one) == 0
    assert run(tmp_path / "taught", *one, f"teacher.path={teacher}", "teacher.coeff=0.5") == 0
    (plain,), (taught,) = metrics(tmp_path / "plain"), metrics(tmp_path / "taught")
    assert taught["critic/score/mean"] == pytest.approx(plain["critic/score/mean"])
    # The mean of GRPO's advantages is weighted by length, and the same in both runs.
    added = taught["critic/advantages/mean"] - plain["critic/advantages/mean"]
    assert added == pytest.approx(-0.5 * taught["actor/teacher_kl"], abs=1e-5) and added != 0


def test_a_teacher_with_another_vocabulary_is_refused(run: Runs, tmp_path: Path) -> None:
    strange = make_tiny_model(tmp_path / "strange", vocab=300)
    with pytest.raises(UserError, match=r"teacher\.path .* have different vocabularies"):
        run(tmp_path / "run", "algorithm.advantage=opd", f"teacher.path={strange}")
