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
from hpc_rl.submission import planning
from hpc_rl.submission.launch import prepare
from hpc_rl.submission.request import Request
from hpc_rl.submission.request import plan as plan_request
from tests.fake_slurm import fake_slurm
from tests.plan.configs import QWEN_7B

PLAN = ("plan", "sft", "model.path=7b", "trainer.device=cuda", "--gpus-per-node", "8")


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


def request(*words: str, gpu_gb: float | None = 80, **more: Any) -> Request:
    """Return a request for supervised fine-tuning of the model on 8 GPUs."""
    own = ("model.path=7b", "data.train_files=train.jsonl", "trainer.device=cuda", "trainer.n_gpus_per_node=8")
    memory = () if gpu_gb is None else (f"slurm.node.gpu_gb={gpu_gb}",)
    return Request("sft", (*own, *memory, *words), **more)


def output(*words: str) -> str:
    """Return what a command prints that ends well."""
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.exception
    return done.stdout


def fit(job_request: Request) -> str | None:
    return planning.check_fit(plan_request(job_request))


def test_a_job_that_fits() -> None:
    assert fit(request()) is None


def test_a_tight_job_is_noted() -> None:
    note = fit(request("model.enable_gradient_checkpointing=true", "trainer.micro_tokens=16384", gpu_gb=28))
    assert note is not None
    assert note.startswith("the job only just fits: the phase `update` needs 2")


def test_a_job_that_cannot_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError) as caught:
        fit(request(gpu_gb=40))
    message = str(caught.value)
    assert message.startswith("1 node x 8 GPUs cannot hold this job: the phase `update` needs ")
    assert "use trainer.micro_tokens=2048 (use smaller micro-batches), or trainer.nnodes=3 (divide " in message
    assert "`submit --force` submits the job anyway" in message


def test_what_a_run_expects_is_recorded() -> None:
    job = plan_request(request("model.enable_gradient_checkpointing=true", "trainer.micro_tokens=8192"))
    facts = planning.expected(job)["plan"]
    assert (facts["phase"], facts["usable_gb"]) == ("update", 76.0)
    assert facts["peak_gb"] == facts["training_gb"] == pytest.approx(25.4, abs=0.1)
    assert facts["less"] == ["model.lora.rank=32", "model.dtype=bfloat16"]
    kept = planning.expected(plan_request(request()))["plan"]
    assert kept["less"] == ["trainer.micro_tokens=2048"]
    assert planning.expected(plan_request(request(gpu_gb=None))) == {}


@pytest.mark.parametrize(
    "other",
    [
        request(gpu_gb=None),
        request("trainer.device=cpu", gpu_gb=1),
        request("model.path=owner/unknown", gpu_gb=1),
        Request("torchrun", ("slurm.node.gpu_gb=1",), ("x.py",)),
    ],
)
def test_what_is_unknown_is_not_refused(other: Request) -> None:
    assert fit(other) is None


def test_force_submits_anyway(monkeypatch: MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("hpc_rl.submission.launch.notes_on", lambda *_: [])  # the model has no weights
    with pytest.raises(UserError, match="cannot hold this job"):
        prepare(request(gpu_gb=40), notes.append)
    prepare(request(gpu_gb=40, force=True), notes.append)
    assert any(note.startswith("submitted nevertheless (--force): 1 node x 8 GPUs cannot hold") for note in notes)


def test_fewest_nodes_with_the_settings_that_they_need() -> None:
    chosen, note = planning.on_fewest_nodes(request("data.max_length=4096", gpu_gb=40, fewest_nodes=True))
    assert note == "--nodes auto: trainer.nnodes=1 model.enable_gradient_checkpointing=true"
    assert chosen.settings == {"trainer.nnodes": 1, "model.enable_gradient_checkpointing": True}
    assert not chosen.fewest_nodes
    small, _ = planning.on_fewest_nodes(request("trainer.n_gpus_per_node=2", gpu_gb=40, fewest_nodes=True))
    assert small.settings["trainer.nnodes"] == 3


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (request(gpu_gb=None), "the memory of the GPUs is unknown; set slurm.node.gpu_gb"),
        (request("trainer.device=cpu"), "the memory of this job (sft) is not planned; give a number of nodes"),
        (request(local=True), "the memory of this job (sft) is not planned"),
        (request(gpu_gb=5), "the job does not fit on 64 nodes: the phase `update` needs "),
        (request("model.path=owner/m"), "model.path owner/m: there is no such folder"),
    ],
)
def test_nodes_that_cannot_be_chosen(other: Request, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        planning.on_fewest_nodes(other)
    assert expected in str(caught.value)


def test_nodes_auto_on_the_command_line(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_rl.submission.launch.notes_on", lambda *_: [])  # the model has no weights
    words = ("model.path=7b", "data.train_files=train.jsonl", "trainer.device=cuda", "slurm.node.gpu_gb=40")
    script = output("submit", "sft", "--nodes", "auto", "--gpus-per-node", "2", *words, "--dry-run")
    assert "#SBATCH --nodes=3\n" in script
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
    assert fit(request("model.path=owner/m", gpu_gb=1)) is None
    assert not asked
    config: Any = planning.planned_config(request("model.path=owner/m"))
    assert planning.shapes_of(config, ask_hub=True)["owner/m"].total == 7_615_616_512
    offline: Any = planning.planned_config(request("model.path=owner/m", "cache.offline=true"))
    with pytest.raises(UserError, match=r"neither the hub's cache nor the hub has its config\.json; run `hpc-rl fetch"):
        planning.shapes_of(offline, ask_hub=True)
    assert asked == ["owner/m"]


def test_folder_without_config(folder: Path) -> None:
    (folder / "7b" / "config.json").unlink()
    config: Any = planning.planned_config(request())
    with pytest.raises(UserError, match=r"^model\.path 7b: 7b has no config\.json, or it is not JSON$"):
        planning.shapes_of(config, ask_hub=False)


def test_plan_needs_neither_data_nor_reward() -> None:
    for kind in ("sft", "dpo", "rm", "ppo", "generate", "eval"):
        found = output("plan", kind, "model.path=7b", "trainer.device=cuda", "--gpu-gb", "80")
        assert "7b: 7.62 x 10^9 parameters" in found


def test_plan_prints_a_table() -> None:
    out = output(*PLAN, "--gpu-gb", "40")
    assert "1 node x 8 GPUs of 40.0 GB; sizes in GB (10^9 bytes) for each GPU" in out
    assert "\nphase   resident  peak  largest parts of the peak\nload        11.4  11.4  model 11.4\n" in out
    assert "\nmemory       does not fit: the phase `update` needs " in out
    assert "\nnodes        fits on 3 or more of this size\n" in out
    assert "\nhost memory  about 131 GB on each node\n" in out
    assert "\ndisk         274 GB for checkpoints, and 15.2 GB for the exported model\n" in out
    assert "\nto make it fit  trainer.micro_tokens=2048 (use smaller micro-batches)\n" in out


def test_plan_as_json() -> None:
    found = json.loads(output(*PLAN, "--gpu-gb", "80", "--json"))
    assert (found["verdict"], found["gpu"], found["usable"]) == ("fits", 80e9, 76e9)
    update = found["phases"][1]
    assert [phase["name"] for phase in found["phases"]] == ["load", "update", "save"]
    assert update["peak"] == pytest.approx(sum({**update["resident"], **update["working"]}.values()), abs=9)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (PLAN, "the memory of the GPUs is unknown: add --gpu-gb 80, or set slurm.node.gpu_gb in the site profile"),
        ((*PLAN, "trainer.device=cpu"), "the job runs on CPUs, and plan is about the memory of GPUs"),
        (("plan", "torchrun", "--gpu-gb", "80", "trainer.device=cuda"), "torchrun runs no model of its own"),
        ((*PLAN, "--gpu-gb", "-1"), "slurm.node.gpu_gb: "),
        ((*PLAN, "--gpu-gb", "80", "model.path=none"), "model.path none: there is no such folder"),
    ],
)
def test_mistakes_are_explained(words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        output(*words)
    assert expected in str(caught.value)
