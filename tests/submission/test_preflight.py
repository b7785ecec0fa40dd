"""What the login node finds wrong with a Ray job before it is queued."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm.commands import NodeListing
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight import checks, folders, hub_names, model_rules, program
from hpc_rl.submission.preflight.program import transformers_version
from hpc_rl.system.disk import Space
from tests.fake_slurm import fake_slurm
from tests.helpers import make_tiny_model, pretend_vllm
from tests.marks import since_5
from tests.small_disk import needs_root, small_disk

ENDPOINT = {"agent__endpoint": "loopback"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    (tmp_path / "score.py").write_text("def score(response, reference):\n    return 1.0\n")
    (tmp_path / "driver.py").write_text("")
    return tmp_path


def check_job(kind: str, values: dict[str, Any], *program: str) -> list[str]:
    return checks.check(Job(kind, compose(kind, [], values), RunDir(Path("run").absolute()), Path.cwd(), program))


def check_ray(*program: str) -> list[str]:
    return check_job("ray", {}, *program)


def check_ppo(**changes: Any) -> list[str]:
    values = {"model.path": "model", "data.train_files": ["train.jsonl"], "data.prompt_key": "question"}
    values |= {"reward.function": "score.py:score", "trainer.device": "cpu", "data.train_batch_size": 1}
    values |= {"actor.mini_batch_size": 1}
    return check_job("ppo", {**values, **{key.replace("__", "."): value for key, value in changes.items()}})


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ([], "no program given: hpc-rl submit ray"),
        (["driver.py", "--x", "a b"], "write -- python driver.py --x 'a b'"),
        (["python", "none.py"], "program none.py: no such file in"),
        (["./none"], r"program \./none: no such file"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_program_that_cannot_be_is_refused(program: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_ray(*program)


@pytest.mark.usefixtures("folder")
def test_a_launcher_that_requests_another_size_is_refused() -> None:
    config = compose("torchrun", [], {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4})
    typed = ("accelerate", "launch", "--num_processes", "4", "driver.py")
    job = Job("torchrun", config, RunDir(Path("run").absolute()), Path.cwd(), typed[-1:], typed=typed)
    with pytest.raises(UserError, match="--num_processes 4, but the job has 8 processes, one for each GPU: leave"):
        checks.check(job)


@pytest.mark.usefixtures("folder")
def test_any_command_may_be_the_driver() -> None:
    assert check_ray("python", "driver.py", "none.py") == []
    assert check_ray("/none/python", "-m", "verl.trainer.main_ppo", "a=1") == []
    with pytest.raises(UserError, match=r"verl needs verl, and .* lacks it"):
        check_ray("python", "-m", "verl.trainer.main_ppo", "a=1")
    assert check_ray("bash", "-c", "true") == []
    assert "is looked up when the job starts" in check_ray("no-such-command-here")[0]


@pytest.mark.usefixtures("folder")
def test_a_ppo_job_that_can_be_has_nothing_to_say() -> None:
    assert check_ppo() == []
    assert check_ppo(trainer__sequence_parallel=2, trainer__n_gpus_per_node=2) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__prompt_key": "text"}, "text"),
        ({"reward__function": "score.py:socre"}, r"no 'socre' in score.py; did you mean score\?"),
        ({"reward__function": "none.py:score"}, "no such file: none.py"),
        ({"environment__name": "none.py:Own"}, r"environment\.name none\.py:Own: no such file: none\.py"),
        ({**ENDPOINT, "agent__command": ["python", "none.py"]}, r"agent\.command: none\.py: no such file in"),
        (
            {**ENDPOINT, "agent__command": ["driver.py", "x"]},
            r"driver\.py is not executable: write \[python,driver\.py,x\]",
        ),
        ({**ENDPOINT, "agent__command": ["./none"]}, r"agent\.command: \./none: no such file"),
        ({"environment__tools": ["score.py:socre"]}, r"no 'socre' in score.py; did you mean score\?"),
        ({"critic__path": "./no/critic"}, r"critic\.path \./no/critic: there is no such folder"),
        (
            {"reward__function": None, "reward__model": "./no/model"},
            r"reward\.model \./no/model: there is no such folder",
        ),
        ({"reward__function": None, "reward__url": "localhost"}, r"reward\.url localhost: expected the form"),
        (
            {"trainer__sequence_parallel": 4, "trainer__n_gpus_per_node": 4},
            r"trainer\.sequence_parallel=4 does not divide the 2 query heads of model\.path model: use one of 1, 2$",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_a_ppo_job_lacks_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_ppo(**changes)


@pytest.mark.usefixtures("folder")
def test_liger_needs_its_package_and_a_model_that_it_supports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"trainer__device": "cuda", "trainer__n_gpus_per_node": 1, "model__use_liger": True, "rollout__name": "hf"}
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(UserError, match=r"model\.use_liger needs liger_kernel, .*\[liger\]"):
            check_ppo(**asked)
    (tmp_path / "packages" / "liger_kernel").mkdir(parents=True)
    (tmp_path / "packages" / "liger_kernel" / "__init__.py").touch()
    importlib.invalidate_caches()
    check_ppo(**asked)
    other = make_tiny_model(tmp_path / "other", kind="gemma2")
    with pytest.raises(UserError, match=r"critic\.path .* is of type gemma2, which model\.use_liger=true does not"):
        check_ppo(**asked, critic__path=str(other), algorithm__advantage="gae")


def test_families_that_training_cannot_compute_are_refused(folder: Path, model: Path) -> None:
    for kind in ("mamba", "modernbert-decoder"):
        shutil.copytree(model, folder / kind)
        settings = json.loads((model / "config.json").read_text())
        (folder / kind / "config.json").write_text(json.dumps({**settings, "model_type": kind}))
    with pytest.raises(UserError, match=r"model\.path mamba cannot be trained in packed rows: models of type mamba"):
        check_ppo(model__path="mamba")
    with pytest.raises(
        UserError, match=r"model\.path modernbert-decoder cannot be trained: models of type .* have no plain LM"
    ):
        check_ppo(model__path="modernbert-decoder")
    check_ppo(critic__path="modernbert-decoder", algorithm__advantage="gae")  # which has no LM head


def test_a_model_that_the_transformers_of_the_job_reads_wrongly_is_refused(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [transformers_version(python) for python in (None, sys.executable, "/no/python")]
    assert found == [version("transformers")] * 2 + [""]
    shutil.copytree(model, folder / "olmoe")
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "olmoe", "rope_parameters": None}
    (folder / "olmoe" / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(model_rules, "transformers_version", lambda _python: "4.57.6")
    with pytest.raises(UserError, match=r"model\.path olmoe cannot be trained with transformers 4\.57\.6, which has"):
        check_ppo(model__path="olmoe")
    check_ppo(model__path="olmoe", slurm__modules=["python"])  # nobody knows its version
    check_ppo(model__path="olmoe", trainer__packing=False)


@since_5
def test_families_that_the_engine_cannot_compute_are_refused(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_vllm(folder, monkeypatch)
    settings = json.loads((model / "config.json").read_text())
    own = {"bamba": {}, "mamba": {}, "falcon_h1": {"mamba_rms_norm": True}}
    for kind, more in {**own, "gated": {**own["falcon_h1"], "mamba_norm_before_gate": False}}.items():
        shutil.copytree(model, folder / kind)
        named = {"model_type": "falcon_h1" if kind == "gated" else kind}
        (folder / kind / "config.json").write_text(json.dumps({**settings, **named, **more}))
    check_ppo(model__path="bamba")
    check_ppo(model__path="gated", rollout__name="vllm")
    with pytest.raises(UserError, match=r"vllm cannot compute model\.path falcon_h1: .* before their gate"):
        check_ppo(model__path="falcon_h1", rollout__name="vllm")
    values = {"data.files": ["train.jsonl"], "data.prompt_key": "question", "trainer.device": "cpu"}
    with pytest.raises(UserError, match=r"model\.path mamba cannot be trained in packed rows: models of type mamba"):
        check_job("generate", {**values, "model.path": "mamba"})  # rollout.name=auto is hf, which is training's code
    refusal = (
        r"rollout\.name=vllm cannot compute model\.path bamba: models of type bamba have .*: set rollout\.name=hf, or"
    )
    for check in (
        lambda: check_ppo(model__path="bamba", rollout__name="vllm"),
        lambda: check_job("generate", {**values, "model.path": "bamba", "rollout.name": "vllm"}),
    ):
        with pytest.raises(UserError, match=refusal):
            check()


@pytest.mark.parametrize("kind", ["generate", "eval"])
@pytest.mark.usefixtures("folder")
def test_environments_of_generation_are_looked_for(kind: str) -> None:
    values = {"model.path": "model", "data.files": ["train.jsonl"], "data.prompt_key": "question"}
    values |= {"trainer.device": "cpu", "environment.name": "none.py:Own"}
    with pytest.raises(UserError, match=r"environment\.name none\.py:Own: no such file: none\.py"):
        check_job(kind, values)


@pytest.fixture
def bare_python(folder: Path) -> str:
    python = folder / "bare-python"
    python.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -S -E "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_what_an_option_requires_is_looked_for_in_the_python_of_the_job(bare_python: str) -> None:
    with pytest.raises(UserError, match=r"(?m)^transfer_queue\.enable=true needs TransferQueue >= .* has none"):
        check_ppo(transfer_queue__enable=True, slurm__python=bare_python)


def test_libraries_are_looked_for_only_where_the_job_runs_this_python(
    bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "installed_ray", lambda: None)
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sys, "executable", bare_python)
    with pytest.raises(UserError) as found:
        check_ppo(rollout__name="vllm", transfer_queue__enable=True)
    (ours, queue, engines) = str(found.value).splitlines()
    assert re.match(
        r"ppo needs torch, .*ray, .* lacks them: install them there \(.*rl\]'\), or set slurm\.python", ours
    )
    assert re.match(r"transfer_queue\.enable=true needs TransferQueue >= .* has none: run pip install", queue)
    assert re.match(
        r"rollout\.name=vllm needs vllm, .* lacks it: install it there \(.* -m pip install .*rl\]'\)", engines
    )
    with pytest.raises(UserError, match=r"(?m)^rollout\.name=auto, which is vllm on GPUs, needs vllm, "):
        check_ppo(trainer__device="cuda")
    (note,) = check_ppo(rollout__name="vllm", slurm__python="/on/the/nodes/python")
    assert "slurm.python /on/the/nodes/python is not on this machine" in note


@pytest.mark.usefixtures("folder")
def test_torchao_is_needed_for_moments_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None if name == "torchao" else name)
    message = r"^optim\.moments=8bit needs torchao, .* install it there \(.*torchao\]'\)"
    for role in ("actor", "critic"):
        with pytest.raises(UserError, match=message):
            check_ppo(**{f"{role}__optim__moments": "8bit", "algorithm__advantage": "gae"})
    check_ppo()
    check_ppo(critic__optim__moments="8bit", algorithm__advantage="grpo", rollout__n=2)  # it has no critic


def test_a_mistyped_folder_is_not_taken_for_a_name_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (folder / "models" / "small").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"model\.path models/smal: .* did you mean models/small\? .* hpc-rl fetch models/"
    ):
        check_ppo(model__path="models/smal")
    with pytest.raises(UserError, match="it has small"):
        check_ppo(model__path="models/qwen")
    with monkeypatch.context() as patch:
        patch.setattr(hub_names, "hub_problem", lambda *_: "")
        assert any("owner/name is a name on the hub" in note for note in check_ppo(model__path="owner/name"))
    snapshot = folder / "hf" / "hub" / "models--models--smal"
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text("abc")
    (snapshot / "snapshots" / "abc").mkdir(parents=True)
    assert any("models/smal is a name on the hub" in note for note in check_ppo(model__path="models/smal"))


def test_cpus_of_ray_init_are_a_number() -> None:
    with pytest.raises(UserError, match="num_cpus is 'all'; expected a whole number of CPUs"):
        compose("ray", [], {"ray_kwargs.ray_init": {"num_cpus": "all"}})


@pytest.mark.usefixtures("folder")
def test_engines_on_the_policys_gpus_need_memory_that_they_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    on = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}
    on_gpus = {"trainer__device": "cuda", "slurm__python": "python3"}
    monkeypatch.setattr(checks, "CHECKS", (checks.gpus,))
    monkeypatch.setattr(checks, "partition", lambda job: iter(()))
    refused = pytest.raises(UserError, match="read its weights by CUDA IPC")
    with refused:
        check_ppo(**on_gpus, slurm__env=on)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with refused:
        check_ppo(**on_gpus)
    check_ppo(**on_gpus, slurm__env={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    check_ppo()
    check_ppo(**on_gpus, rollout__name="hf")
    apart = {"spec": {"train": [1], "roll": [1]}, "roles": {"rollout": "roll"}}
    check_ppo(**on_gpus, trainer__n_gpus_per_node=2, pools=apart)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    with refused:
        check_ppo(**on_gpus, slurm__setup=["module load cuda", "export PYTORCH_ALLOC_CONF='expandable_segments:True'"])
    check_ppo(**on_gpus, slurm__env=on, model__lora__rank=8, rollout={"name": "vllm", "merge_lora": False})


@pytest.mark.parametrize(("kind", "gpu_type", "gpus", "is_refused"), [
    ("torchrun", "a100_1g.5gb", 2, True),
    ("torchrun", "nvidia_h100_80gb_hbm3_3g.40gb", 4, True),
    ("torchrun", "a100_1g.5gb", 1, False),
    ("torchrun", "h100_80gb", 2, False),
    ("ray", "a100_1g.5gb", 2, False),
    ("ppo", "a100_1g.5gb", 2, True),
    ("ppo", "a100_1g.5gb", 1, False),
    ("ppo apart", "a100_1g.5gb", 2, True),
    ("ppo apart on the host", "a100_1g.5gb", 2, False),
    ("generate", "a100_1g.5gb", 2, False),
    ("generate TP", "a100_1g.5gb", 2, True),
])  # fmt: skip
def test_slices_of_gpus_do_not_train_together(kind: str, gpu_type: str, gpus: int, is_refused: bool) -> None:
    options: dict[str, Any] = {"slurm.gpu_type": gpu_type, "trainer.n_gpus_per_node": gpus, "trainer.device": "cuda"}
    kind, *where = kind.split(" ", 1)
    if kind == "ppo":
        options |= {"model.path": "m", "data.train_files": ["f"], "reward.function": "exact"}
    elif kind == "generate":
        options |= {"model.path": "m", "data.files": ["f"], "rollout.tensor_parallel_size": 2 if where else 1}
    if kind == "ppo" and where:
        options |= {"pools": {"spec": {"train": [1], "roll": [1]}, "roles": {"rollout": "roll"}}}
        options |= {"rollout.name": "hf" if "host" in where[0] else "vllm"}
    config = compose(kind, [], options)
    questions = list(checks.gpus(Job(kind, config, RunDir(Path("run").absolute()), Path.cwd(), ("x.py",))))
    if is_refused:
        check, *arguments = questions[0]
        with pytest.raises(UserError, match=f"{gpu_type} is a slice of a GPU .MIG., and {gpus} processes of a node"):
            check(*arguments)
    else:
        assert [check(*arguments) for check, *arguments in questions] in ([], [None])


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SESSION_TOKEN", "OPENAI_KEY", "hf_token", "MY_PASSWD"])
def test_a_secret_in_the_configuration_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"slurm.env.{name}: the job script, .* would show it; .* `export {name}=...`"):
        checks.check_secrets("HF_HOME", name)


@pytest.mark.usefixtures("folder")
def test_the_key_of_a_server_has_to_be_in_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model.path": "model", "data.files": ["train.jsonl"], "data.prompt_key": "question"}
    values |= {"rollout.name": "openai", "rollout.openai.base_url": "http://x/v1", "trainer.device": "cpu"}
    values |= {"rollout.openai.key_variable": "LLM_API_KEY"}

    def check(**more: Any) -> list[str]:
        return check_job("generate", {**values, **{key.replace("__", "."): value for key, value in more.items()}})

    monkeypatch.delenv("LLM_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"^rollout\.openai\.key_variable is LLM_API_KEY, and this shell has no such"):
        check()
    check(slurm__setup=["source ~/.keys"])
    monkeypatch.setenv("LLM_API_KEY", "")
    with pytest.raises(UserError, match="`export LLM_API_KEY="):
        check()
    monkeypatch.setenv("LLM_API_KEY", "sk-1")
    check()


@pytest.mark.usefixtures("folder")
def test_a_server_of_others_has_the_weights() -> None:
    for file in Path("model").iterdir():
        if file.suffix != ".safetensors":
            Path("tokenizer").mkdir(exist_ok=True)
            Path("tokenizer", file.name).write_bytes(file.read_bytes())
    values = {"model.path": "tokenizer", "data.files": ["train.jsonl"], "data.prompt_key": "question"}
    values |= {"trainer.device": "cpu"}
    with pytest.raises(UserError, match=r"^model\.path tokenizer has no weights"):
        check_job("generate", values)
    values |= {"rollout.name": "openai", "rollout.openai.base_url": "http://x/v1"}
    check_job("generate", values)


def test_other_variables_are_no_secrets() -> None:
    checks.check_secrets("HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "EOS_TOKEN", "WANDB_MODE")


@pytest.mark.parametrize("key", ["setup", "epilogue"])
@pytest.mark.usefixtures("folder")
def test_commands_that_bash_cannot_read_are_refused(key: str) -> None:
    def check(*lines: str) -> list[str]:
        return check_job("ray", {f"slurm.{key}": list(lines)}, "python", "driver.py")

    check("if true", "then cd /", "fi")
    with pytest.raises(UserError, match=rf"^slurm\.{key}: bash cannot read 'echo \"a': line 1: unexpected EOF"):
        check('echo "a')


def test_how_often_rows_are_used_if_files_have_weights(folder: Path) -> None:
    row = json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n"
    (folder / "more.jsonl").write_text(row * 3)
    mixed = {"train.jsonl": 0.5, "more.jsonl": 0.5}
    assert check_ppo(data__train_files=mixed) == [
        "data.train_files: if the job leaves out no row, an epoch has 2 samples of train.jsonl (50.0%; each of its 1 "
        "is used 2 times); 2 samples of more.jsonl (50.0%; each of its 3 is used 0.667 times)"
    ]
    (note,) = check_ppo(data__train_files={"train.jsonl": 1, "more.jsonl": 2}, data__train_batch_size=3)
    assert "an epoch has 1 sample of train.jsonl (33.3%;" in note, "a fourth row does not fill a batch"
    assert "; 2 samples of more.jsonl (66.7%;" in note
    with pytest.raises(
        UserError, match=r"data\.train_files: more\.jsonl has the weight 0\.01 of 1\.01, and an epoch of 4"
    ):
        check_ppo(data__train_files={"train.jsonl": 1, "more.jsonl": 0.01})
    (folder / "more.jsonl").write_text("")
    with pytest.raises(UserError, match=r"data\.train_files: more\.jsonl: the data set is empty"):
        check_ppo(data__train_files=mixed)


@pytest.mark.parametrize(("files", "warned"), [(100, False), (99, True)])
def test_little_space_for_the_run_directory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, warned: bool
) -> None:
    space = Space("/scratch", "nfs", 10**9, files, False)
    monkeypatch.setattr(folders, "space_of", lambda _: space)
    said = folders.check_run_dir(tmp_path / "run")
    assert said == (f"run directory {tmp_path}/run: {space}, which is little for a job" if warned else None)


ELSEWHERE = {
    "data.train_files": ["/node/train.jsonl"], "data.val_files": ["/node/data/val.parquet"],
    "model.path": "/node/model", "model.tokenizer_path": "/node/model", "data.chat_template": "/node/chat.jinja",
    "reward.function": "/node/score.py:score", "environment.name": "/node/world.py:World",
}  # fmt: skip


@pytest.mark.parametrize("key", ELSEWHERE)
@pytest.mark.usefixtures("folder")
def test_files_of_the_nodes_alone_can_be_named(key: str) -> None:
    changes = {key: ELSEWHERE[key]}
    with pytest.raises(UserError, match="/node/"):
        check_ppo(**changes)
    assert check_ppo(**changes, slurm__node_folders=["/node"]) == []
    with pytest.raises(UserError, match="/node/"):
        check_ppo(**changes, slurm__node_folders=["/nod", "/node/else"])


@pytest.mark.usefixtures("folder")
def test_a_program_of_the_nodes_alone_can_be_named() -> None:
    for words in (("python", "/node/driver.py"), ("/node/driver",)):
        with pytest.raises(UserError, match="/node/driver"):
            check_ray(*words)
        assert check_job("ray", {"slurm.node_folders": ["/node"]}, *words) == []


def test_a_folder_of_the_nodes_is_a_full_path() -> None:
    with pytest.raises(UserError, match=r"node_folders.*local is not a full path"):
        compose("sft", [], {"model.path": "m", "data.train_files": ["a"], "slurm.node_folders": ["local"]})


@needs_root
@pytest.mark.parametrize(("code", "warned"), [(1, True), (0, False)])
def test_a_run_directory_on_a_disk_of_this_machine_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, warned: bool
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "scontrol").write_text(f"#!/bin/bash\nexit {code}\n")
    nodes = NodeListing()
    monkeypatch.setattr(nodes, "groups", lambda: ["a group"])
    with small_disk(tmp_path / "disk") as disk:
        said = folders.check_shared(disk.path / "runs" / "a", Path("/proc"), nodes)
        assert bool(said) == warned
        if warned:
            assert said and said.startswith(
                f"run directory {disk.path}/runs/a is on {disk.path} (tmpfs), which looks like"
            )
            assert "Folder" not in said and "\n" not in said
            assert str(folders.check_shared(disk.path / "runs" / "a", disk.path, nodes)).count("looks like") == 1
        output = folders.check_shared(Path("/proc/x"), Path("/proc"), nodes, disk.path / "out")
        assert str(output).startswith("the program's output folder") == warned
        monkeypatch.setattr(nodes, "groups", list)  # there is no cluster
        assert folders.check_shared(disk.path, Path("/proc"), nodes) is None
    monkeypatch.setattr(nodes, "groups", lambda: ["a group"])
    assert folders.check_shared(Path("/proc/x"), Path("/proc"), nodes) is None


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("import no_such_package\n", "no_such_package"),
        ("from no_such_package.part import name\n", "no_such_package"),
        ("import helper\n", "no_such_package"),
        ("import json, helper_without\nfrom . import x\n", None),
        ("try:\n    import no_such_package\nexcept ImportError:\n    pass\n", None),
        ("import sys\nsys.path.append('/elsewhere')\nimport no_such_package\n", None),
    ],
)
def test_packages_that_a_reward_imports_are_there(folder: Path, code: str, missing: str | None) -> None:
    (folder / "helper.py").write_text("import no_such_package, score\n")
    (folder / "helper_without.py").touch()
    (folder / "score.py").write_text(f"{code}\ndef score(response, reference):\n    return 1.0\n")
    if missing is None:
        assert check_ppo() == []
        return
    with pytest.raises(UserError, match=rf"reward.function score.py:score needs {missing}, and .* install it there,"):
        check_ppo()


def test_tools_need_a_template_that_shows_them(folder: Path) -> None:
    (folder / "tools.py").write_text(
        "def add(a: int, b: int) -> int:\n    return a + b\n\n"
        "class Shop:\n    def buy(self, item: str) -> str:\n        return item\n\n"
        "    def step(self, text):\n        return text, True\n"
    )
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "plain.jinja").write_text(plain)
    (folder / "tools.jinja").write_text("{{ tools }}" + plain)
    for used in ({"environment__tools": ["tools.py:add"]}, {"environment__name": "tools.py:Shop"}):
        check_ppo(**used, data__chat_template="tools.jinja")
        check_ppo(**used, data__chat_template="plain.jinja", environment__tool_format="json")
        with pytest.raises(UserError, match="the chat template shows the model no tools"):
            check_ppo(**used, data__chat_template="plain.jinja")


@pytest.mark.parametrize("look", [*checks.CHECKS, checks.partition, checks.shared])
def test_each_check_can_say_what_it_is_for(look: Any) -> None:
    assert re.match(r"(whether|which|what) [^\n.]+$", checks.purpose_of(look))
