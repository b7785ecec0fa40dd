"""The check that a job fits, before it is submitted; and `hpc-rl plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from typer.testing import CliRunner

from hpc_rl.cli import app
from hpc_rl.errors import UserError
from hpc_rl.slurm import commands
from hpc_rl.slurm.cluster import NodeGroup
from hpc_rl.submission import planning
from hpc_rl.submission.launch import prepare
from hpc_rl.submission.request import JobRequest
from hpc_rl.submission.request import plan as plan_request
from hpc_rl.submission.resources import granted_bytes
from tests.fake_slurm import fake_slurm
from tests.plan.configs import QWEN_7B

ROWS, AUTO = "trainer.micro_tokens=4096", "trainer.micro_tokens=auto"
PLAN = ("plan", "sft", "model.path=7b", "trainer.device=cuda", "--gpus-per-node", "8", ROWS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A folder with a model of 7B without weights, on a login node."""
    monkeypatch.chdir(tmp_path)
    fake_slurm(tmp_path, monkeypatch)
    model = tmp_path / "7b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    return tmp_path


def request(*words: str, gpu_gb: float | None = 80, **more: Any) -> JobRequest:
    """Return a request for supervised fine-tuning of the model on 8 GPUs, with ROWS if no word sets them."""
    words = words if any(word.startswith("trainer.micro_tokens=") for word in words) else (ROWS, *words)
    own = ("model.path=7b", "data.train_files=train.jsonl", "trainer.device=cuda", "trainer.n_gpus_per_node=8")
    memory = () if gpu_gb is None else (f"slurm.node.gpu_gb={gpu_gb}",)
    return JobRequest("sft", (*own, *memory, *words), **more)


def output(*words: str) -> str:
    """Return what a command prints that ends well."""
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.exception
    return done.stdout


def fit(job_request: JobRequest) -> list[str]:
    job = plan_request(job_request)
    found = planning.plan_of_job(job)
    return [] if found is None else planning.check_fit(found, job.size, job_request.force)


def expected(job_request: JobRequest) -> dict[str, Any]:
    found = planning.plan_of_job(plan_request(job_request))
    assert found is not None
    return planning.expected("sft", found)["plan"]  # type: ignore[no-any-return]


def test_a_job_that_fits() -> None:
    assert fit(request()) == []


def test_a_tight_job_is_noted() -> None:
    (note,) = fit(request("model.enable_gradient_checkpointing=true", "trainer.micro_tokens=16384", gpu_gb=28))
    assert note.startswith("the job only just fits: the phase `update` needs 2")


def test_a_job_that_cannot_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError) as caught:
        fit(request(gpu_gb=40))
    first, *ways, last = str(caught.value).splitlines()
    assert first.startswith("1 node x 8 GPUs cannot hold this job: the phase `update` needs ")
    assert ways == [
        "to make it fit: trainer.micro_tokens=2048 (use smaller micro-batches)",
        "to make it fit: trainer.nnodes=3 (divide the model among more GPUs)",
    ]
    assert last == "`hpc-rl plan` shows the phases; --force submits the job anyway"


def test_a_model_that_is_only_guessed_is_not_refused(folder: Path) -> None:
    (folder / "7b" / "config.json").write_text(json.dumps({**QWEN_7B, "model_type": "new"}))
    first, second = fit(request(gpu_gb=40))
    assert first.startswith("the job may not fit: the phase `update` needs ")
    assert second == "model.path 7b is of type new, which is counted like Llama"


def test_what_a_run_expects_is_recorded() -> None:
    facts = expected(request("model.enable_gradient_checkpointing=true", "trainer.micro_tokens=8192"))
    assert (facts["phase"], facts["usable_gb"]) == ("update", 76.0)
    assert facts["peak_gb"] == facts["training_gb"] == pytest.approx(25.4, abs=0.1)
    assert facts["less"] == ["trainer.offload=optimizer"]
    assert expected(request())["less"] == ["trainer.micro_tokens=2048"]
    engines = JobRequest(
        "generate", ("model.path=7b", "data.files=train.jsonl", "trainer.device=cuda", "slurm.node.gpu_gb=80")
    )
    found = planning.plan_of_job(plan_request(engines))
    assert found is not None
    alone = planning.expected("generate", found)["plan"]
    assert (alone["phase"], alone["training_gb"], alone["less"]) == ("generation", 0, [])


def test_what_a_run_like_it_is_compared_by() -> None:
    facts = expected(request())
    assert (facts["gpu"], facts["gpus"], facts["items"], facts["step_s"]) == ("80 GB", 8, 64, [])
    assert facts["parameters"] == pytest.approx(7.6e9, rel=0.01)
    named = expected(request("slurm.gpu_type=h100"))
    assert named["gpu"] == "h100"
    assert named["step_s"] == [pytest.approx(0.66, abs=0.01), pytest.approx(3.0, abs=0.2)]


def host(*words: str, force: bool = False) -> list[str]:
    job = plan_request(request("trainer.offload=optimizer", "trainer.save_async=false", *words))
    found = planning.plan_of_job(job)
    assert found is not None
    return planning.check_host(found, granted_bytes(job.config), force)


def test_host_memory_for_what_waits() -> None:
    """7B: 61 GB of moments, and 40 GB that are assumed for 8 processes."""
    assert host("slurm.mem=100G") == []
    assert host("slurm.mem=90G") == [
        "the job may not fit: trainer.offload=optimizer keeps 60.9 GB in the memory of each node; with processes and "
        "copies for checkpoints, a node needs about 101 GB, and the job requests 96.6 GB"
    ]
    with pytest.raises(
        UserError, match=r"and the job requests 32\.2 GB: request more memory \(--mem\), or use more nodes; --fo"
    ):
        host("slurm.mem=30G")
    assert host("slurm.mem=30G", force=True)[0].startswith("the job may not fit: trainer.offload=optimizer keeps")
    assert host("slurm.mem=30G", "trainer.offload=none") == []
    inputs = ("model.enable_gradient_checkpointing=true", "model.enable_activation_offload=true")
    (both,) = host("slurm.mem=30G", *inputs, force=True)
    assert both.startswith(
        "the job may not fit: trainer.offload=optimizer with model.enable_activation_offload=true keeps 68.4 GB in"
    )
    with pytest.raises(UserError, match=r"^model.enable_activation_offload=true keeps 7\.5 GB in the memory") as found:
        host("slurm.mem=6G", "trainer.offload=none", *inputs)
    assert "request more memory (--mem), or lower trainer.micro_tokens; --force" in str(found.value)
    assert host() == []


def test_memory_that_a_job_requests() -> None:
    def of(*words: str) -> float | None:
        return granted_bytes(plan_request(request(*words)).config)

    assert of("slurm.mem=3G") == 3 * 2.0**30
    assert of("slurm.mem=0", "slurm.node.mem_mb=1000") == 1000 * 2.0**20
    assert of("slurm.mem=0") is None
    assert of() is None
    assert of("slurm.mem=3G", "slurm.sbatch.mem-per-gpu=200G") is None


@pytest.mark.parametrize(
    "other",
    [
        request(gpu_gb=None),
        request("trainer.device=cpu", gpu_gb=1),
        request("model.path=owner/unknown", gpu_gb=1),
        JobRequest("torchrun", ("slurm.node.gpu_gb=1",), ("x.py",)),
    ],
)
def test_what_is_unknown_is_not_refused(other: JobRequest) -> None:
    assert planning.plan_of_job(plan_request(other)) is None


def test_force_submits_anyway(monkeypatch: MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("hpc_rl.submission.launch.notes_on", lambda *_: [])  # the model has no weights
    with pytest.raises(UserError, match="cannot hold this job"):
        prepare(request(gpu_gb=40), notes.append)
    job, _ = prepare(request(gpu_gb=40, force=True), notes.append)
    assert any(note.startswith("the job may not fit: the phase `update` needs ") for note in notes)
    assert job.facts["plan"]["phase"] == "update"  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "gpu_gb", "expected"),
    [
        ((), 80, ["trainer.micro_tokens=auto: 4,096 tokens in each pass of a rank. The phase `update` needs 47"]),
        (("trainer.micro_tokens=8192",), 141, []),
        (("trainer.device=cpu",), None, []),
        ((), None, ["trainer.micro_tokens=auto: the job decides at its start, because the memory of the GPUs (slurm"]),
        (("model.path=new",), 80, ["trainer.micro_tokens=auto: the job decides at its start, because the config.json"]),
    ],
)
def test_the_rows_of_a_submission(
    words: tuple[str, ...], gpu_gb: float | None, expected: list[str], monkeypatch: MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("hpc_rl.submission.launch.notes_on", lambda *_: [])  # the model has no weights
    (folder / "new").mkdir()
    notes: list[str] = []
    rows = () if any(word.startswith("trainer.micro_tokens") for word in words) else (AUTO,)
    job, _ = prepare(request("data.train_batch_size=256", *rows, *words, gpu_gb=gpu_gb), notes.append)
    found = [note for note in notes if note.startswith("trainer.micro_tokens")]
    assert [note.startswith(start) for note, start in zip(found, expected, strict=True)] == [True] * len(expected)
    assert job.config.trainer.micro_tokens == ("auto" if rows else 8192)  # type: ignore[attr-defined]


def test_auto_is_recorded_with_what_needs_less() -> None:
    facts = expected(request(AUTO, "data.train_batch_size=256"))
    assert facts["peak_gb"] == pytest.approx(47.3, abs=0.1)
    assert facts["less"] == ["trainer.micro_tokens=2048"]


def test_the_shortest_rows_do_not_fit() -> None:
    with pytest.raises(UserError) as caught:
        fit(request(AUTO, gpu_gb=25))
    first, rows, *ways, _ = str(caught.value).splitlines()
    assert first.startswith("1 node x 8 GPUs cannot hold this job: the phase `update` needs 27.5 GB on each GPU")
    assert rows.startswith("trainer.micro_tokens=auto: 1,024 tokens in each pass of a rank. The phase `update` needs 2")
    assert ways == [
        "to make it fit: model.enable_gradient_checkpointing=true (recompute activations, which takes up to a third "
        "more time)",
        "to make it fit: trainer.nnodes=2 (divide the model among more GPUs)",
    ]


def test_a_plan_with_auto() -> None:
    words = [AUTO if word == ROWS else word for word in PLAN]
    out = output(*words, "--gpu-gb", "40", "data.train_batch_size=256")
    assert "\nmemory       fits: the phase `update` needs 34.0 GB on each GPU" in out
    assert "\nmicro-batch  trainer.micro_tokens=auto: 2,048 tokens in each pass of a rank. The phase `update` " in out
    assert json.loads(output(*words, "--gpu-gb", "40", "--json", "data.train_batch_size=256"))["micro_tokens"] == 2048
    assert json.loads(output(*PLAN, "--gpu-gb", "40", "--json"))["micro_tokens"] is None


def test_fewest_nodes_with_the_settings_that_they_need() -> None:
    chosen, note = planning.on_fewest_nodes(request("data.max_length=4096", gpu_gb=40, fewest_nodes=True))
    assert note == "--nodes auto: trainer.nnodes=1 model.enable_gradient_checkpointing=half"
    assert chosen.settings == {"trainer.nnodes": 1, "model.enable_gradient_checkpointing": "half"}
    assert not chosen.fewest_nodes
    small, _ = planning.on_fewest_nodes(request("trainer.n_gpus_per_node=2", gpu_gb=40, fewest_nodes=True))
    assert small.settings == {
        "trainer.nnodes": 2,
        "trainer.micro_tokens": 2048,
        "trainer.offload": "optimizer",
    }


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (request(gpu_gb=None), "the memory of the GPUs is unknown; set slurm.node.gpu_gb"),
        (request("trainer.device=cpu"), "the memory of this job (sft) is not planned; give a number of nodes"),
        (request(local=True), "the memory of this job (sft) is not planned"),
        (request("pools.spec={a: [8]}"), "--nodes auto: pools.spec states the nodes of the job; give their number"),
        (request(gpu_gb=5), "the job does not fit on 64 nodes: the phase `update` needs "),
        (request("model.path=owner/m"), "model.path owner/m: there is no such folder"),
    ],
)
def test_nodes_that_cannot_be_chosen(other: JobRequest, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        planning.on_fewest_nodes(other)
    assert expected in str(caught.value)


def test_nodes_auto_on_the_command_line(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_rl.submission.launch.notes_on", lambda *_: [])  # the model has no weights
    words = ("model.path=7b", "data.train_files=train.jsonl", "trainer.device=cuda", "slurm.node.gpu_gb=40")
    script = output("submit", "sft", "--nodes", "auto", "--gpus-per-node", "2", *words, "--dry-run")
    assert "#SBATCH --nodes=2\n" in script
    for command in ("plan", "sweep"):
        with pytest.raises(UserError, match="--nodes auto is an option of submit and render"):
            output(command, "sft", "--nodes", "auto", *words, "optim.lr=1e-5,3e-5")
    with pytest.raises(UserError, match="--nodes two: expected a number, or auto"):
        output("submit", "sft", "--nodes", "two")


def test_a_hub_is_asked_by_plan_only(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked: list[str] = []

    def answer(name: str) -> dict[str, Any]:
        asked.append(name)
        return QWEN_7B

    monkeypatch.setattr(planning, "hub_config", answer)
    assert planning.plan_of_job(plan_request(request("model.path=owner/m", gpu_gb=1))) is None
    assert not asked
    config: Any = planning.planned_config(request("model.path=owner/m"))
    assert planning.shapes_of(config, ask_hub=True)["owner/m"].total == 7_615_616_512
    offline: Any = planning.planned_config(request("model.path=owner/m", "cache.offline=true"))
    with pytest.raises(
        UserError, match=r"and the hub's cache does not have its config\.json: run `hpc-rl fetch owner/m`"
    ):
        planning.shapes_of(offline, ask_hub=True)
    assert asked == ["owner/m"]


def test_folder_without_config(folder: Path) -> None:
    (folder / "7b" / "config.json").unlink()
    config: Any = planning.planned_config(request())
    with pytest.raises(UserError, match=r"^model\.path 7b: the folder has no config\.json$"):
        planning.shapes_of(config, ask_hub=False)
    (folder / "7b" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"^model\.path 7b: config\.json in this folder is not JSON$"):
        planning.shapes_of(config, ask_hub=False)


def test_plan_needs_neither_data_nor_reward() -> None:
    for kind in ("sft", "dpo", "rm", "ppo", "generate", "eval"):
        found = output("plan", kind, "model.path=7b", "trainer.device=cuda", "--gpu-gb", "80")
        assert "7b: 7.62 x 10^9 parameters" in found


def test_a_setting_of_rewards_alone_names_no_reward() -> None:
    words = ("plan", "ppo", "model.path=7b", "trainer.device=cuda", "--gpu-gb", "80")
    for more in ("reward.timeout_s=60", "reward.url=http://a/b", "environment.tools=[python]"):
        assert "7.62 x 10^9" in output(*words, more)


def test_the_memory_on_the_command_line_comes_first() -> None:
    out = output(*PLAN, "slurm.gpu_type=a100_80gb", "--gpu-gb", "40")
    assert "8 GPUs of 40.0 GB" in out


def test_a_short_cache_is_the_reason(folder: Path) -> None:
    out = output("plan", "generate", "model.path=7b", "trainer.device=cuda", "--gpu-gb", "18.5")
    assert "1 node x 1 GPU of 18.5 GB" in out
    assert "memory       does not fit: the weights of the model do not fit into an engine's part of a GPU" in out


def test_plan_prints_a_table() -> None:
    out = output(*PLAN, "--gpu-gb", "40")
    assert "1 node x 8 GPUs of 40.0 GB; sizes in GB (10^9 bytes) for each GPU" in out
    assert "\nphase   resident  peak  largest parts of the peak\nload        11.4  11.4  model 11.4\n" in out
    assert "\nmemory       does not fit: the phase `update` needs " in out
    assert "\nnodes        fits on 3 or more nodes of this size\n" in out
    assert "\nhost memory  about 131 GB on each node\n" in out
    assert "\ndisk         274 GB for checkpoints, and 15.2 GB for the exported model\n" in out
    assert "\ntime         unknown, because slurm.gpu_type is not set: use a name such as h100 or a100\n" in out
    assert "\n\nto make it fit  trainer.micro_tokens=2048 (use smaller micro-batches)\n" in out


def test_plan_prints_the_disk_of_streamed_data() -> None:
    stream = ("data.train_files=me/Sums", "data.stream_rows=1000000", "trainer.total_training_steps=9")
    out = output(*PLAN, "--gpu-gb", "40", *stream)
    assert "exported model\n             up to 4.1 GB for the tokens of a window, besides its text\n" in out
    assert json.loads(output(*PLAN, "--gpu-gb", "40", "--json", *stream))["window"] == 1_000_000 * 1024 * 4


def test_plan_prints_the_time_of_a_step_and_of_the_run(folder: Path) -> None:
    named = output(*PLAN, "slurm.gpu_type=h100", "data.train_files=train.jsonl")
    *_, step, run = named.splitlines()
    assert step.startswith("time         0.66 to 3 s for a step (at 12 to 55 % of 989 TFLOPS, all at their full length")
    assert run == "             0.66 to 3 s for 1 step: 0.00018 to 0.00084 node hours"


def test_plan_is_as_fast_as_an_earlier_run(folder: Path) -> None:
    run = folder / "runs" / "sft-1"
    run.mkdir(parents=True)
    facts = {"kind": "sft", "plan": expected(request(gpu_gb=80))}
    (run / "job.json").write_text(json.dumps(facts))
    record = {"perf/tokens_per_s": 16000.0, "perf/time_per_step": 2.0, "perf/max_memory_gb": 50.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **record}) + "\n" for step in (1, 2)))
    words = (*PLAN, "--gpu-gb", "80", "data.train_batch_size=128", "trainer.total_training_steps=900")
    out = output(*words)
    assert "\n             the similar run sft-1 recorded 50.5 GB, and its plan expected 47.3 GB\n" in out
    *_, step, whole = out.splitlines()
    assert step == "time         4 s for a step (as fast as run sft-1: 2,000 tokens/s/GPU, samples of 500 tokens)"
    assert whole == "             60 min for 900 steps: 1 node hour"
    assert json.loads(output(*words, "--json"))["time"] == {
        "step_s": [4.0, 4.0],
        "steps": 900,
        "run_s": [3600.0, 3600.0],
        "node_hours": [1.0, 1.0],
        "basis": "as fast as run sft-1: 2,000 tokens/s/GPU, samples of 500 tokens",
    }


def test_an_earlier_run_tells_the_memory_of_the_gpus(folder: Path) -> None:
    attempt = folder / "runs" / "sft-1" / "attempt-1"
    attempt.mkdir(parents=True)
    (attempt.parent / "job.json").write_text("{}")
    (attempt.parent / "config.yaml").write_text("slurm: {partition: gpu}\n")
    lines: list[dict[str, Any]] = [
        {"time": 1.0, "node": "gpu01"},
        {"time": 2.0, "memory_gb": 1.0, "gpus": [[1.0, 2.0, 42.9]]},
    ]
    (attempt / "node0-usage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = output(*PLAN, "slurm.partition=gpu")
    assert "1 node x 8 GPUs of 42.9 GB; sizes in GB" in out
    assert f"\nrun {attempt.parent} recorded the memory of a GPU\n" in out
    assert "recorded the memory of a GPU" not in output(*PLAN, "slurm.partition=gpu", "--gpu-gb", "40")
    with pytest.raises(UserError, match=r"that of the run \S+/sft-1; if it is wrong, set slurm\.node\.gpu_gb\)"):
        fit(request("slurm.partition=gpu", gpu_gb=None))


@pytest.mark.parametrize("own", [(), ("trainer.device=auto",)])
def test_who_names_the_memory_of_gpus_plans_for_gpus_where_none_are_seen(
    monkeypatch: MonkeyPatch, own: tuple[str, ...]
) -> None:
    monkeypatch.setattr(commands, "available", lambda: True)
    monkeypatch.setattr(commands, "node_groups", lambda _place: [NodeGroup("cpu", 4, 32, 200_000, {}, is_default=True)])
    words = ("plan", "sft", "model.path=7b", "--gpus-per-node", "8", ROWS, *own)
    assert "1 node x 8 GPUs of 80.0 GB" in output(*words, "--gpu-gb", "80")
    with pytest.raises(UserError, match="the job runs on CPUs"):
        output(*words)


def test_plan_as_json() -> None:
    found = json.loads(output(*PLAN, "--gpu-gb", "80", "--json"))
    assert (found["verdict"], found["gpu"], found["usable"], found["time"]) == ("fits", 80e9, 76e9, None)
    update = found["phases"][1]
    assert [phase["name"] for phase in found["phases"]] == ["load", "update", "save"]
    assert update["peak"] == pytest.approx(sum({**update["resident"], **update["working"]}.values()), abs=9)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (PLAN, "the memory of the GPUs is unknown: add --gpu-gb 80, or set slurm.node.gpu_gb in the site profile"),
        ((*PLAN, "trainer.device=cpu"), "the job runs on CPUs, and plan is about the memory of GPUs"),
        (("plan", "torchrun", "--gpu-gb", "80", "trainer.device=cuda"), "torchrun runs no model of its own"),
        (("plan", "select", "--gpu-gb", "80"), "select runs no model of its own, so there is nothing to plan"),
        ((*PLAN, "--gpu-gb", "80", "model.path=/none"), "and the hub's cache does not have its config.json"),
        ((*PLAN, "--gpu-gb", "-1"), "slurm.node.gpu_gb: "),
        (
            (*PLAN, "--gpu-gb", "80", "trainer.sequence_parallel=8"),
            "trainer.sequence_parallel=8 does not divide the 28 query heads of model.path 7b: use one of 1, 2, 4, 7",
        ),
        ((*PLAN, "--gpu-gb", "80", "model.path=none"), "model.path none: there is no such folder"),
    ],
)
def test_mistakes_are_explained(words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        output(*words)
    assert expected in str(caught.value)


def test_the_verdict_of_training_is_before_the_plan(folder: Path) -> None:
    (folder / "7b" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match=r"model\.path 7b cannot be trained in packed rows: models of type mamba"):
        output(*PLAN, "--gpu-gb", "80")
