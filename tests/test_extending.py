"""docs/extending.md: its examples run as they are printed.

A block that begins with a comment `# path/file.py` is a file, and becomes a module of that name. A block that begins
with `# row of TABLE in path/file.py` is a row, and is evaluated with the names of that file and of the example's
module.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_rl.algorithms.estimators import ESTIMATORS, AdvantageInputs
from hpc_rl.algorithms.losses import Clip, PolicyBatch, ppo
from hpc_rl.algorithms.policy_losses import POLICY_LOSSES
from hpc_rl.config import kinds
from hpc_rl.config.keys import documented_keys
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.sft import DataConfig, SftConfig
from hpc_rl.environments import protocol as environments
from hpc_rl.environments.loading import load_definition
from hpc_rl.environments.protocol import Episode
from hpc_rl.environments.tool_calls import ToolCall
from hpc_rl.rewards.worker import load_function
from hpc_rl.system import accelerators
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import load_model
from tests.helpers import make_tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
_ELSEWHERE = ("## Rollout engine", "## Container runtime")
"""The first sections that are run by tests/rl/rollout/test_adding.py and tests/images/test_extending.py."""
_TEXT = PAGE.read_text()
_OWN = _TEXT[: _TEXT.index(_ELSEWHERE[0])] + _TEXT[_TEXT.index("## Objective of fine-tuning") :]
_BLOCKS = re.findall(r"^```python\n# (.*?)\n(.*?)^```$", _OWN, re.MULTILINE | re.DOTALL)
FILES = {head: text for head, text in _BLOCKS if not head.startswith("row of ")}
ROWS = {head.split()[2]: (head.split()[4], text) for head, text in _BLOCKS if head.startswith("row of ")}


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a file of the page, and import it under the name that it would have."""

    def imported(path: str) -> ModuleType:
        file = tmp_path / Path(path).name
        file.write_text(f"# {path}\n{FILES[path]}")
        spec = importlib.util.spec_from_file_location(dotted(path), file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, dotted(path), module)
        spec.loader.exec_module(module)
        return module

    return imported


def row(table: str, module: ModuleType) -> dict[str, Any]:
    """Evaluate a row of a table that is a dict, with the names that its file would see."""
    file, text = ROWS[table]
    names = {**vars(importlib.import_module(dotted(file))), **vars(module)}
    found: dict[str, Any] = eval("{" + text + "}", names)
    return found


def test_every_block_is_run() -> None:
    assert {"my/rewards.py", "my/search.py", "hpc_rl/algorithms/opo.py", "hpc_rl/algorithms/spo.py"} < FILES.keys()
    assert ROWS.keys() == {"ESTIMATORS", "POLICY_LOSSES", "KINDS", "ACCELERATORS"}
    assert len(_BLOCKS) == len(FILES) + len(ROWS) == 10


def test_reward_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my").mkdir()
    Path("my/rewards.py").write_text(FILES["my/rewards.py"])
    score = load_function("my/rewards.py:score", {"format_bonus": 0.2})
    row = {"aliases": ["four"]}
    assert score("So <answer> 4 </answer>.", "4", row=row) == pytest.approx(1.2)
    assert score("<answer>four</answer>", "4", row=row) == pytest.approx(1.2)
    assert score("<answer>5</answer>", "4", row=row) == pytest.approx(0.2)
    assert score("<answer>4</answer><answer>4</answer>", "4", row=row) == score("4", "4", row=row) == 0.0


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my").mkdir()
    Path("my/search.py").write_text(FILES["my/search.py"])
    definition = load_definition("my/search.py:Search", {"most": 1})
    assert list(definition.tools) == ["find"] and definition.has_step and definition.has_reward
    episode = Episode(definition, 1000)
    assert episode.reset({"text": "a red house\na dog", "answer": "red"}) == "Search the text. It has 2 lines."
    found = [episode.call(ToolCall("find", {"word": "House"})) for _ in range(2)]
    assert found[0].messages[0]["content"] == '["a red house"]'
    assert found[1].messages[0]["content"] == "Error: RuntimeError: no more searches" and found[1].bad_calls == 1
    assert episode.answer("It is red.", []).done
    assert episode.result() == environments.EpisodeResult(1.0, {"searches": 2.0})


def test_advantage_estimator(example: Any) -> None:
    added = row("ESTIMATORS", example("hpc_rl/algorithms/opo.py"))
    assert not added.keys() & ESTIMATORS.keys()
    outcome = AdvantageInputs(
        rewards_N=torch.tensor([1.0, 0, 0, 3.0, 0, 2.0, 2.0]),
        lengths_B=torch.tensor([1, 3, 2, 1]),
        groups_B=torch.tensor([7, 7, 4, 4]),
    )
    advantages_N = added["opo"](outcome).advantages_N
    # The first group's baseline is (1 * 1 + 3 * 3) / 4; in the second group all scores are equal.
    torch.testing.assert_close(advantages_N, torch.tensor([-1.5, 0.5, 0.5, 0.5, 0, 0, 0]))


def test_policy_loss(example: Any) -> None:
    added = row("POLICY_LOSSES", example("hpc_rl/algorithms/spo.py"))
    assert not added.keys() & POLICY_LOSSES.keys()
    old_N, advantages_N, lengths_B = torch.full((4,), -1.0), torch.tensor([1.0, 1.0, -2.0, -2.0]), torch.tensor([4])
    ratio_N = torch.tensor([1.0, 1.4, 1.0, 0.6])
    new_N = (old_N + ratio_N.log()).requires_grad_()
    found = added["spo"](PolicyBatch(new_N, old_N, advantages_N, lengths_B, Clip(0.2, 0.2, None)))
    found.loss_N.sum().backward()
    assert found.loss_N.tolist() == pytest.approx([-1.0, -1.0, 2.0, 2.0])
    assert found.clipped_N.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert found.kl_N.tolist() == pytest.approx((old_N - new_N).tolist())
    gradient = new_N.grad
    assert gradient is not None
    # At equal policies it is that of PPO; beyond the bound it leads back.
    same_N = old_N.clone().requires_grad_()
    ppo(PolicyBatch(same_N, old_N, advantages_N, lengths_B, Clip(0.2, 0.2, None))).loss_N.sum().backward()
    assert same_N.grad is not None
    assert gradient[[0, 2]].tolist() == pytest.approx(same_N.grad[[0, 2]].tolist())
    assert gradient[1] > 0 and gradient[3] < 0


def test_sft_objective(example: Any, tmp_path: Path) -> None:
    module = example("hpc_rl/finetune/dft.py")
    folder = make_tiny_model(tmp_path / "model")
    ids = torch.arange(5, 17)
    batch = pack_samples([ids.numpy()], [(ids > 8).numpy()])
    logits_TV = AutoModelForCausalLM.from_pretrained(folder)(ids[None]).logits[0]
    logprobs_N = logits_TV[3:-1].log_softmax(-1).gather(1, ids[4:, None])[:, 0]
    expected = -0.5 * (logprobs_N.exp() * logprobs_N).sum()
    config = SftConfig(model=ModelConfig(path=str(folder)), data=DataConfig(train_files=["unused"]))
    found = module.Dft(config).loss(load_model(config.model), batch, 0.5)
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-5)


def test_job_kind(example: Any) -> None:
    module = example("hpc_rl/config/dft.py")
    file, text = ROWS["KINDS"]
    assert dotted(file) == kinds.__name__
    kind = eval(text, dict(vars(kinds)))
    assert kind.name not in kinds.KINDS
    assert kind.schema is module.DftConfig
    assert "power" in {key for key, *_ in documented_keys(kind.schema)}
    assert not kind.takes_program


def test_vendor_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, text = ROWS["ACCELERATORS"]
    assert dotted(file) == accelerators.__name__
    (added,) = eval("(" + text + ")", dict(vars(accelerators)))
    monkeypatch.setattr(accelerators, "ACCELERATORS", (*accelerators.ACCELERATORS, added))
    (tmp_path / "dev" / "accel").mkdir(parents=True)
    for number in range(8):
        (tmp_path / "dev" / "accel" / f"accel{number}").touch()
    assert accelerators.find_accelerators({"PATH": ""}, tmp_path) == ("hpu", 8)
    assert accelerators.ray_resource("hpu") == "HPU"
    assert accelerators.collective_defaults("hpu", "ib0") == {"HCCL_SOCKET_IFNAME": "ib0"}
    hpu = pytest.importorskip("ray._private.accelerators.hpu")
    assert hpu.HPUAcceleratorManager.get_resource_name() == added.resource
    assert hpu.HPUAcceleratorManager.get_visible_accelerator_ids_env_var() == added.visible[0]
    assert f"RAY_EXPERIMENTAL_NOSET_{added.noset[0]}" == hpu.NOSET_HABANA_VISIBLE_MODULES_ENV_VAR
