"""Which runs take nodes of other jobs, and what a lender has from its run."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose, dump
from hpc_rl.config.rl.generate import EvalConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.offer import LENT_ENVIRONMENTS
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.launch import notes_on
from hpc_rl.submission.lending import borrower, lend_job
from hpc_rl.submission.script.render import node_options, render
from hpc_rl.tracking.points import add_point, points_file
from hpc_rl.training.checkpoints.beside import saved_in
from tests.plan.configs import QWEN_7B

OPEN: dict[str, Any] = {
    "model.path": "model", "data.train_files": ["a.jsonl"], "reward.function": "gsm8k", "trainer.device": "cpu",
    "trainer.nnodes": 2, "trainer.n_gpus_per_node": 3, "slurm.python": "/opt/python", "slurm.mem": "9G",
}  # fmt: skip


def run_of(folder: Path, state: str = "RUNNING", kind: str = "ppo", **changed: Any) -> RunDir:
    run = RunDir(folder / "runs" / "math")
    run.path.mkdir(parents=True)
    run.job.write_text(json.dumps({"kind": kind, "job_id": "7", "working_dir": str(folder)}))
    run.status.write_text(json.dumps({"job_id": "7", "attempt": 1, "state": state, "exit_code": None}))
    run.config.write_text(dump(compose("ppo", [], {**OPEN, **changed})))
    return run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without Slurm
    return tmp_path


def test_a_lender_has_the_software_of_its_run_and_resources_of_its_own(folder: Path) -> None:
    run = run_of(folder)
    job = lend_job(run, ["lend.wait_s=5"], {"trainer.nnodes": 4}, None)
    assert (job.name, job.program, job.config.trainer.nnodes) == ("math-lend-1", (str(run.path),), 4)
    assert (job.config.trainer.n_gpus_per_node, job.config.slurm.python) == (3, "/opt/python")
    assert job.config.slurm.mem is None and job.config.slurm.requeue
    assert job.facts == {"lends_to": str(run.path)}
    assert node_options(job)[-4:] == ["--start-timeout", "300", "--wait", "5"]
    (folder / "runs/math-lend-1").mkdir()
    assert lend_job(run, ["slurm.requeue=false"], {"trainer.n_gpus_per_node": 1}, None).name == "math-lend-2"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"kind": "sft"},
            "run math is of kind sft: only runs of `hpc-rl submit ppo` take engines",
        ),
        ({"kind": None}, "run math was not started by `hpc-rl submit`"),
        ({"state": "COMPLETED"}, r"run math has ended \(COMPLETED\) and takes no nodes: resume it"),
        ({"state": "STOPPED"}, r"run math has ended \(STOPPED\)"),
        ({"trainer.nnodes": 1}, "is on one node, and listens only to itself: submit it with slurm.interface=NAME"),
    ],
    ids=str,
)
def test_some_runs_take_no_nodes(folder: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        lend_job(run_of(folder, **changed), [], {}, None)


@pytest.mark.parametrize("opens", [{"rollout.engines": "lent"}, {"slurm.interface": "eth0"}], ids=str)
def test_a_run_on_one_node_can_be_opened(folder: Path, opens: dict[str, str]) -> None:
    assert borrower(run_of(folder, **{"trainer.nnodes": 1, **opens}))


GPUS = "trainer.n_gpus_per_node"
TOOLS: dict[str, Any] = {"environment.tools": ["python"], "environment.workers": 6}


@pytest.mark.parametrize("typed", [{}, {GPUS: 0}], ids=str)
def test_nodes_for_environments_have_cpus_alone(folder: Path, typed: dict[str, int]) -> None:
    run = run_of(folder, **TOOLS, **{"trainer.device": "cuda"})
    job = lend_job(run, [], {"trainer.nnodes": 2, **typed}, None, "environments")
    script = render(job)
    assert "#SBATCH --cpus-per-task=6\n" in script and "gpu" not in script.partition("export")[0].lower()
    assert node_options(job)[:4] == ["--processes", "1", "--device", "cpu"]
    assert node_options(job)[-2:] == ["--resource", LENT_ENVIRONMENTS]
    own = lend_job(run, ["slurm.cpus_per_task=9"], {}, None, "environments")
    assert "#SBATCH --cpus-per-task=9\n" in render(own)


@pytest.mark.parametrize(
    ("changed", "role", "given", "said"),
    [
        ({}, "environments", {}, r"run math has no environment \(environment.name, environment.tools\)"),
        (TOOLS, "judges", {}, r"--role judges: choose one of engines \(generate responses\), environments"),
        (TOOLS, "engines", {GPUS: 0}, "--gpus-per-node 0: --role engines needs GPUs"),
        (TOOLS, "environments", {GPUS: 2}, "--gpus-per-node 2: --role environments uses no GPUs"),
        ({**TOOLS, "trainer.nnodes": 1}, "environments", {}, "is on one node, and listens only to itself"),
    ],
    ids=str,
)
def test_a_role_that_makes_no_sense_is_refused(
    folder: Path, changed: dict[str, Any], role: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        lend_job(run_of(folder, **changed), [], given, None, role)


def test_environments_do_not_care_about_the_size_of_engines(folder: Path) -> None:
    run = run_of(folder, **TOOLS, **{"rollout.name": "vllm", "rollout.tensor_parallel_size": 3})
    assert lend_job(run, [], {}, None, "environments").config.trainer.device == "cpu"


def test_a_lender_of_a_run_in_the_queue_starts_after_it(folder: Path) -> None:
    run = run_of(folder, state="PENDING")
    assert lend_job(run, [], {}, None).config.slurm.sbatch == {"dependency": "after:7"}
    assert "dependency" not in lend_job(run_of(folder / "b"), [], {}, None).config.slurm.sbatch


def test_a_run_without_engines_has_no_pool_for_them() -> None:
    pools = {"pools.spec": {"a": [3], "b": [3]}, "pools.roles.rollout": "b"}
    with pytest.raises(UserError, match="no engines for a pool"):
        compose("ppo", [], {**OPEN, "rollout.engines": "lent", **pools})


def test_a_lent_node_holds_whole_engines(folder: Path) -> None:
    run = run_of(folder, **{"rollout.name": "vllm", "rollout.tensor_parallel_size": 3})
    assert lend_job(run, [], {"trainer.n_gpus_per_node": 6}, None)
    with pytest.raises(UserError, match=r"4 GPUs per node .* do not hold whole engines of run math, which have 3 GPUs"):
        lend_job(run, [], {"trainer.n_gpus_per_node": 4}, None)


@pytest.mark.parametrize(("engine", "role"), [("hf", "engines"), ("vllm", "engines"), ("hf", "eval"), ("vllm", "eval")])
def test_gpus_that_cannot_hold_an_engine_are_refused(folder: Path, engine: str, role: str) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(QWEN_7B))
    run = run_of(folder, **{"trainer.device": "cuda", "rollout.name": engine, "data.val_files": ["b.jsonl"]})

    def note(*words: str) -> str:
        return lend_job(run, ["slurm.cpus_per_gpu=4", *words], {}, None, role).note

    assert note("slurm.gpu_type=a30") == "" == note()  # without a type, their memory is not known
    found = r"GPUs of 16\.0 GB \(memory of .*\) cannot hold an engine of run math: the .*\. Choose GPUs with more"
    with pytest.raises(UserError, match=found):
        note("slurm.node.gpu_gb=16")
    (folder / "model/config.json").unlink()
    assert note("slurm.node.gpu_gb=16") == ""


def finetuned(folder: Path, state: str = "RUNNING", kind: str = "sft", **changed: Any) -> RunDir:
    run = run_of(folder, state, kind)
    options = {"model.path": "model", "data.train_files": ["a.jsonl"], "trainer.device": "cpu", "slurm.mem": "9G"}
    run.config.write_text(dump(compose("sft", [], {**options, **changed})))
    return run


VALIDATED = {"data.val_files": ["b.jsonl"], "data.prompt_key": "question", "data.response_key": "solution"}


def test_an_evaluation_has_model_prompts_and_rewards_of_its_run(folder: Path) -> None:
    run = run_of(folder, **{"data.val_files": ["b.jsonl"], "data.prompt_key": "question", "rollout.max_num_seqs": 7})
    job = lend_job(run, ["lend.wait_s=5", "rollout.n=2"], {"trainer.nnodes": 4}, None, "eval")
    config = job.config
    assert isinstance(config, EvalConfig) and (job.name, job.kind, job.program) == ("math-eval-1", "eval", ())
    assert (config.eval.follow, config.model.path, config.lend.wait_s) == (str(run.path), "model", 5)
    assert (config.data.files, config.data.prompt_key, config.reward.function) == (["b.jsonl"], "question", "gsm8k")
    assert (config.rollout.n, config.rollout.max_num_seqs, config.trainer.nnodes) == (2, 7, 4)
    assert (config.slurm.python, config.slurm.mem, config.slurm.requeue) == ("/opt/python", None, True)
    other = lend_job(run, ["reward.functions=[math,format]", "data.files=c.jsonl"], {}, None, "eval").config
    assert isinstance(other, EvalConfig) and (other.reward.function, other.data.files) == (None, ["c.jsonl"])
    assert other.identity != config.identity != config.updated("rollout.n", 3).identity


def test_relative_paths_are_those_of_the_folder_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finetuned(folder, **VALIDATED)
    (folder / "b.jsonl").write_text('{"question": "1", "solution": "2"}\n')
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    Path("c.jsonl").write_text('{"question": "1", "solution": "2"}\n')
    job = lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")
    assert (job.working_dir, job.run_dir.path) == (folder, folder / "elsewhere/runs/math-eval-1")
    with pytest.raises(UserError, match=r"^model\.path model is not a path here[^\n]*$"):  # alone: the data is there
        notes_on([job])
    with pytest.raises(UserError, match=r"data\.files: c.jsonl: no such data file"):
        notes_on([lend_job(run, ["reward.function=gsm8k", "data.files=c.jsonl"], {}, None, "eval")])
    run.job.write_text(json.dumps({"kind": "sft", "job_id": "7", "working_dir": str(folder / "gone")}))
    with pytest.raises(UserError, match="gone, the folder in which run math was submitted, is not there: restore it"):
        lend_job(run, [], {}, None, "eval")


def test_an_evaluation_of_fine_tuning_asks_for_what_the_run_does_not_have(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^run math does not [^\n]*: add data.files=FILE reward.function=NAME$"):
        lend_job(finetuned(folder / "a"), [], {}, None, "eval")
    run = finetuned(folder / "b", **VALIDATED)
    with pytest.raises(UserError, match=r": add reward.function=NAME$"):
        lend_job(run, [], {}, None, "eval")
    config = lend_job(run, ["reward.function=gsm8k"], {}, None, "eval").config
    assert isinstance(config, EvalConfig) and config.data.files == ["b.jsonl"]
    assert (config.data.prompt_key, config.data.answer_key) == ("question", "solution")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "rm"}, "run math is of kind rm: --role eval scores the checkpoints"),
        ({"trainer.save_minutes": 0}, r"saves nothing before its end \(trainer.save_freq=0, trainer.save_minutes=0\)"),
        ({"state": "COMPLETED"}, r"has ended \(COMPLETED\), and its checkpoints are not there"),
    ],
    ids=str,
)
def test_some_runs_have_nothing_to_score(folder: Path, changed: dict[str, Any], said: str) -> None:
    run = finetuned(folder, **VALIDATED, **changed)
    with pytest.raises(UserError, match=said):
        lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")


def test_a_run_that_has_ended_is_scored_once(folder: Path) -> None:
    run = finetuned(folder, state="STOPPED", **VALIDATED)
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    (run.checkpoints / "step-00000004/trainer.json").touch()
    job = lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")
    assert isinstance(job.config, EvalConfig)
    saved = saved_in(run.checkpoints)[4]
    add_point(points_file(run.path, job.config.identity, "math-eval-1"), *saved.key, {"eval/score": 0.5})
    with pytest.raises(UserError, match=r"has ended \(STOPPED\), and its checkpoints have scores of this evaluation"):
        lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")
    assert lend_job(run, ["reward.function=math"], {}, None, "eval")
    (run.checkpoints / "step-00000004/trainer.json").write_text("of another attempt")
    assert lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")


def test_an_evaluation_has_one_job(folder: Path) -> None:
    run = finetuned(folder, **VALIDATED)
    job = lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")
    job.run_dir.path.mkdir()
    job.run_dir.config.write_text(dump(job.config))
    job.run_dir.job.write_text(json.dumps({"kind": "eval", "job_id": "8", "lends_to": str(run.path)}))
    job.run_dir.write_status("8", 1, "RUNNING", None)
    with pytest.raises(UserError, match="run math-eval-1 already scores the checkpoints of run math with these"):
        lend_job(run, ["reward.function=gsm8k"], {"trainer.nnodes": 2}, None, "eval")
    assert lend_job(run, ["reward.function=math"], {}, None, "eval").name == "math-eval-2"
    job.run_dir.write_status("8", 1, "CANCELLED", None)
    assert lend_job(run, ["reward.function=gsm8k"], {}, None, "eval")


def test_an_evaluation_waits_only_beside_a_training() -> None:
    options = {"model.path": "m", "data.files": ["a"], "reward.function": "gsm8k", "lend.wait_s": 5}
    with pytest.raises(UserError, match=r"lend.wait_s is for an evaluation during training: set eval.follow"):
        compose("eval", [], options)
    with pytest.raises(UserError, match=r"engine_kwargs.quantization=fp8: the engines need the policy's new weights"):
        own = {"rollout.name": "vllm", "rollout.engine_kwargs": {"quantization": "fp8"}, "eval.follow": "runs/a"}
        compose("eval", [], {**options, **own})
