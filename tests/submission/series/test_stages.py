"""Which results of earlier stages a stage accepts as its models."""

from pathlib import Path

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.series.stages import check_models, check_responses

LORA = "model.lora.rank=2"
SOURCES = {
    "sft": [],
    "rm": [],
    "rm-2": ["data.label_keys=[a,b]"],
    "adapters": ["model.lora.rank=2", "model.lora.merge=false"],
    "merged": ["model.lora.rank=2"],
}
PPO = ["model.path=/m", "data.train_files=x", "reward.function=exact", "trainer.device=cpu"]


def job(kind: str, name: str, *words: str) -> Job:
    return Job(kind, compose(kind, words), RunDir(Path("/runs") / name), Path("/"))


def before() -> list[Job]:
    words = ("model.path=/m", "data.train_files=x", "trainer.device=cpu")
    return [job("rm" if name.startswith("rm") else "sft", name, *words, *own) for name, own in SOURCES.items()]


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("sft", ["model.path=/runs/sft/model"], None),
        ("sft", ["model.path=/runs/merged/model"], None),
        ("sft", ["model.path=/m", "model.lora.path=/runs/adapters/model"], None),
        ("rm", ["model.path=/runs/rm/model"], None),
        ("rm", ["model.path=/runs/adapters/model"], "model.path is the result of adapters (sft), which exports only"),
        ("sft", ["model.path=/runs/rm/model"], "model.path is the result of rm (rm), a reward model"),
        ("dpo", ["model.path=/m", "ref.path=/runs/rm/model"], "ref.path is the result of rm (rm), a reward model"),
        ("distill", ["model.path=/m", "teacher.path=/runs/rm/model"], "teacher.path is the result of rm (rm)"),
        ("ppo", [*PPO, "reward.function=null", "reward.model=/runs/rm/model"], None),
        ("ppo", [*PPO, "critic.path=/runs/rm/model"], None),
        (
            "ppo",
            [*PPO, "critic.path=/runs/adapters/model"],
            "critic.path is the result of adapters (sft), which exports",
        ),
        (
            "ppo",
            [*PPO, "reward.function=null", "reward.model=/runs/sft/model"],
            "reward.model is the result of sft (sft), a language model, and a reward model is needed",
        ),
        (
            "ppo",
            [*PPO, "reward.function=null", "reward.model=/runs/rm-2/model"],
            "reward.model is the result of rm-2 (rm), which has 2 outputs (data.label_keys), but reward.weights needs",
        ),
        ("ppo", [*PPO, "reward.function=null", "reward.model=/runs/rm-2/model", "reward.weights=[1,2]"], None),
        (
            "ppo",
            [*PPO, "reward.function=null", "reward.model=/runs/rm/model", "reward.weights=[1,2]"],
            "reward.model is the result of rm (rm), which has 1 outputs (data.label_keys), but reward.weights needs 2",
        ),
        ("ppo", [*PPO, "critic.path=/runs/rm-2/model"], "critic.path is the result of rm-2 (rm), which has 2 outputs"),
        ("rm", ["model.path=/runs/rm-2/model"], "model.path is the result of rm-2 (rm), which has 2 outputs"),
        ("rm", ["model.path=/runs/rm-2/model", "data.label_keys=[c,d]"], None),
        (
            "eval",
            ["data.files=x", "reward.function=exact", "model.path=/runs/rm/model"],
            "model.path is the result of rm",
        ),
    ],
)
def test_a_stage_takes_models_of_the_kind_that_it_needs(kind: str, words: list[str], said: str | None) -> None:
    data = [] if kind in ("ppo", "eval") else ["data.train_files=x"]
    found = job(kind, "last", *data, *words)
    if said is None:
        check_models(found, before())
    else:
        with pytest.raises(UserError) as error:
            check_models(found, before())
        assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("words", "method", "said"),
    [
        (["rollout.n=2"], "pairs", "which has no reward"),
        (["reward.function=exact", "rollout.n=1"], "best-of-n", "with one response to each prompt"),
        (["reward.function=exact", "rollout.n=2"], "pairs", None),
        (["reward.function=exact", "rollout.n=1"], "threshold", None),
    ],
)
def test_a_selection_needs_scores_and_several_responses(words: list[str], method: str, said: str | None) -> None:
    source = job("generate", "g", "model.path=/m", "data.files=x", "trainer.device=cpu", *words)
    limit = ["select.threshold=1"] if method == "threshold" else []
    found = job("select", "s", "select.responses=/runs/g/responses.jsonl", f"select.method={method}", *limit)
    if said is None:
        check_responses(found, [source])
    else:
        with pytest.raises(UserError, match=f"^select.responses is the result of g .generate., {said}"):
            check_responses(found, [source])
