"""Conversations with environments in processes of their own; the model's turns follow from the row of the prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt, prompt_tokenizer
from hpc_rl.errors import UserError
from hpc_rl.rl.converse.conversations import Conversations
from hpc_rl.rl.converse.environment import Environment
from hpc_rl.rl.converse.environment_hosts import open_environments
from hpc_rl.rl.converse.partner import turn_seed
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.loop.metrics import conversation_metrics
from hpc_rl.rl.rollout.engine import Completion, Sampling
from tests.environments.templates import CHATML, OPENS_THINKING, QWEN3_WITHOUT_SWITCH
from tests.helpers import make_tokenizer
from tests.rl.ppo_config import ppo_config
from tests.rl.scripted import Scripted

OWN = r'''
import time

class Own:
    """Adds up. The row says what goes wrong."""

    def reset(self, wrong="", first=None, seed=None, **row):
        self.total, self.wrong, self.said = 0, wrong, ""
        if wrong == "first":
            return [{"role": "user", "content": "no text"}]
        if wrong == "reset":
            raise OSError("no disk")
        return f"Seed {seed}." if wrong == "seed" else first

    def add(self, x: int) -> int:
        """Add a number.

        Args:
            x: The number.
        """
        if self.wrong == "hang":
            time.sleep(600)
        if self.wrong == "raise":
            raise OSError("no disk")
        self.total += x
        return self.total if self.wrong != "flood" else "x" * 10**6

    def step(self, text):
        self.said = text
        if self.wrong == "content":
            return [{"role": "user", "content": "no text"}]
        if text.startswith("again"):
            role = "system" if self.wrong == "role" else "user"
            return [{"role": role, "content": "And?"}]
        return None

    def reward(self):
        if self.wrong == "reward":
            raise OSError("no disk")
        return {"score": self.total, "said": len(self.said)}
'''
CALL = '<tool_call>{"name": "add", "arguments": {"x": %d}}</tool_call>'
DEADLINE_S = 600
LONG = "data.max_response_length=2000", "data.max_prompt_length=2000", "trainer.micro_tokens=4000"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer(320)
    made.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>"])
    no_text = CHATML.replace("{{ message", r"{{ '\ud83d' if message.content == 'no text' else message")
    made.chat_template = no_text.replace("{% if tools %}", "{% if tools %}<tool_call>")
    return made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


def config_of(own: Path, *overrides: str) -> PpoConfig:
    options = [f"environment.name={own}:Own", "environment.workers=2", "environment.max_output_chars=200", *LONG]
    return ppo_config(*options, *overrides)


def environment_of(config: PpoConfig, tokenizer: Any) -> Environment:
    return Environment(config, tokenizer, open_environments(config, Path()))


@pytest.fixture(scope="module")
def opened(own: Path, tokenizer: Any) -> Iterator[Environment]:
    environment = environment_of(config_of(own, "environment.timeout_s=60"), tokenizer)
    yield environment
    environment.close()


def prompts_of(rows: Sequence[dict[str, Any]], config: PpoConfig, tokenizer: Any, tools: Any) -> list[Prompt]:
    asked = {"messages": [{"role": "user", "content": "Sum?"}], "answer": "3"}
    return prompt_tokenizer(config.data, tokenizer, tools)([({**asked, **row}, "row") for row in rows])[0]


def converse(
    opened: Environment,
    tokenizer: Any,
    own: Path,
    *rows: dict[str, Any],
    overrides: Sequence[str] = (),
    n: int = 1,
    waves: Sequence[int] = range(100),
    order: int = 0,
) -> tuple[list[Conversed], Scripted]:
    """Let the model converse about rows, which take turns with the waves; return all conversations."""
    config = config_of(own, *overrides)
    model = Scripted(tokenizer, order)
    conversations = Conversations(model, opened, config)  # type: ignore[arg-type]
    sampling = Sampling(config.data.max_response_length)
    asked = [
        conversations.ask(prompt, [(10 * number + i, sampling) for i in range(n)], waves[number % len(waves)])
        for number, prompt in enumerate(prompts_of(rows, config, tokenizer, opened.schemas))
    ]
    conversations.wait(asked)
    found = [one for each in asked for one in each.completions()]
    assert all(isinstance(one, Conversed) for one in found)
    for one in found:
        assert sum(span.tokens for span in one.spans) == len(one.token_ids) == len(one.logprobs)
        assert len(one.token_ids) <= config.data.max_response_length
    return found, model  # type: ignore[return-value]


def wait_for(started: list[int], number: int) -> None:
    """Wait until the event loop has started so many conversations."""
    deadline = time.monotonic() + DEADLINE_S
    while len(started) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sampled_text(tokenizer: Any, one: Conversed) -> str:
    ids = one.token_ids if one.mask is None else one.token_ids[one.mask]
    return str(tokenizer.decode(ids))


def test_a_conversation_is_what_the_template_renders_and_keeps_the_tokens_of_the_model(
    opened: Environment, tokenizer: Any, own: Path
) -> None:
    turns = [CALL % 1 + CALL % 5, "again", CALL % 4, "It is 10."]
    (found,), _ = converse(opened, tokenizer, own, {"turns": turns})
    observations = [
        [{"role": "tool", "content": "1"}, {"role": "tool", "content": "6"}],
        [{"role": "user", "content": "And?"}],
        [{"role": "tool", "content": "10"}],
        [],
    ]
    messages = [{"role": "user", "content": "Sum?"}]
    for text, observed in zip(turns, observations, strict=True):
        messages += [{"role": "assistant", "content": text}, *observed]
    assert found.prompt is not None
    whole = tokenizer.apply_chat_template(messages, tools=opened.schemas, tokenize=False)
    assert tokenizer.decode([*found.prompt, *found.token_ids]) + "\n" == whole
    written = [{"role": one["role"], "content": one["content"]} for one in found.messages]
    assert written == messages
    assert sampled_text(tokenizer, found) == "".join(f"{turn}<|im_end|>" for turn in turns)
    assert found.sampled == sum(map(len, turns)) + 4, "one token for each letter"
    assert found.finished and (found.turns, found.calls, found.bad_calls) == (4, 3, 0)
    assert (found.outcome.score, found.outcome.components) == (10.0, {"said": 9.0})
    assert tokenizer.decode(found.last_turn) == "It is 10.<|im_end|>"


def test_later_turns_go_to_the_same_engine_with_seeds_of_their_own(
    opened: Environment, tokenizer: Any, own: Path
) -> None:
    rows = [{"turns": [CALL % 1, CALL % 2, "end"]}, {"turns": ["again", "end"]}]
    found, model = converse(opened, tokenizer, own, *rows, n=3)
    assert [one.outcome.score for one in found] == [3, 3, 3, 0, 0, 0]
    first = [asked for asked in model.asked if asked[3] is None]
    assert [len(draws) for _, draws, _, _ in first] == [3, 3], "the first turns of a prompt share an engine"
    assert {wave: [seed for seed, _ in draws] for _, draws, wave, _ in first} == {0: [0, 1, 2], 1: [10, 11, 12]}
    later = [asked for asked in model.asked if asked[3] is not None]
    assert all(len(draws) == 1 for _, draws, _, _ in later)
    seeds = {wave: sorted(draws[0][0] for _, draws, each, _ in later if each == wave) for wave in (0, 1)}
    assert seeds[1] == sorted(turn_seed(seed, 1) for seed in (10, 11, 12))
    assert seeds[0] == sorted(turn_seed(seed, turn) for seed in (0, 1, 2) for turn in (1, 2))
    assert len({*seeds[0], *seeds[1]}) == 9 and turn_seed(4, 0) == 4


def test_responses_do_not_depend_on_the_order_in_which_engines_answer(
    opened: Environment, tokenizer: Any, own: Path
) -> None:
    rows = [{"turns": [CALL % number, "again", f"end {number}"]} for number in range(4)]
    runs = [converse(opened, tokenizer, own, *rows, n=2, order=order)[0] for order in range(3)]
    texts = [[tokenizer.decode(one.token_ids) for one in found] for found in runs]
    assert texts[0] == texts[1] == texts[2]
    assert [one.outcome.score for one in runs[2]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_no_more_conversations_are_open_than_engines_and_environments_have_room_for(
    opened: Environment, tokenizer: Any, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt starts with all its conversations. Earlier waves go first, then longer prompts, then earlier ones."""
    rows = [{"turns": [CALL % 1, "end"], "number": number} for number in range(12)]
    for number in (5, 9):
        rows[number]["messages"] = [{"role": "user", "content": "Sum, please?"}]
    turn, start = Scripted.turn, opened.processes.start
    open_at_turns: list[int] = []
    started: list[int] = []

    def noted_turn(self: Scripted, timeout_s: float) -> None:
        open_at_turns.append(sum(worker.load for worker in opened.processes._workers))
        turn(self, timeout_s)

    def noted_start(prompt: list[Any], row: dict[str, Any]) -> Any:
        started.append(row["number"])
        return start(prompt, row)

    monkeypatch.setattr(Scripted, "turn", noted_turn)
    monkeypatch.setattr(opened.processes, "start", noted_start)
    found, _ = converse(opened, tokenizer, own, *rows, n=2, waves=(1, 0))
    assert [one.outcome.score for one in found] == [1.0] * 24
    first, second = [5, 9, 1, 3, 7, 11], [0, 2, 4, 6, 8, 10]
    assert started == [number for number in [*first, *second] for _ in range(2)]
    assert 4 < max(open_at_turns) <= Scripted.capacity + 2 + 1


def test_validation_starts_although_the_conversations_of_a_training_fill_all_room(
    opened: Environment, tokenizer: Any, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, start = config_of(own), opened.processes.start
    conversations = Conversations(Scripted(tokenizer), opened, config)  # type: ignore[arg-type]
    started: list[int] = []

    def noted_start(prompt: list[Any], row: dict[str, Any]) -> Any:
        started.append(row["number"])
        return start(prompt, row)

    monkeypatch.setattr(opened.processes, "start", noted_start)
    rows = [{"turns": [CALL % 1, CALL % 1, "end"], "number": number} for number in range(20)]
    prompts = prompts_of(rows, config, tokenizer, opened.schemas)
    draws = [(0, Sampling(config.data.max_response_length))]
    asked = [conversations.ask(prompt, draws, wave=3) for prompt in prompts[:10]]
    conversations.turn(60)
    wait_for(started, 6)
    assert started == [0, 1, 2, 3, 4, 5], "4 in the engines and 2 in the environments"
    asked += [conversations.ask(prompt, draws, wave=0) for prompt in prompts[10:]]
    conversations.turn(60)
    wait_for(started, 12)
    assert started[6:] == [10, 11, 12, 13, 14, 15]
    conversations.wait(asked)
    assert [one.outcome.score for each in asked for one in each.completions()] == [2.0] * 20  # type: ignore[attr-defined]
    assert sorted(started) == [*range(20)] and started.index(19) < started.index(6)
    assert not conversations._open


def test_what_goes_wrong_is_an_observation_or_a_failed_score(opened: Environment, tokenizer: Any, own: Path) -> None:
    fine, again = [CALL % 1, "end"], ["again", "end"]
    rows = [
        {"turns": fine, "wrong": "reset"},
        {"turns": fine, "wrong": "hang"},
        {"turns": fine, "wrong": "raise"},
        {"turns": fine, "wrong": "flood"},
        {"turns": fine, "wrong": "reward"},
        {"turns": again, "wrong": "role"},
        {"turns": again, "wrong": "content"},
        {"turns": again, "wrong": "first"},
        {"turns": ["<tool_call>{nonsense", "end"]},
        {"turns": fine, "first": "x" * 3000},
    ]
    for row in rows:
        (found,), _ = converse(opened, tokenizer, own, row)
        wrong = row.get("wrong")
        if wrong == "reset":
            assert found.outcome.error == "OSError: no disk" and len(found.token_ids) == 1 and not found.finished
            assert [one["role"] for one in found.messages] == ["user", "assistant"]
        elif wrong == "hang":
            assert found.outcome.error == "the environment took over 60 s and was ended" and found.turns == 1
        elif wrong in ("raise", "flood"):
            assert found.outcome.score is not None and found.turns == 2 and found.bad_calls == (wrong == "raise")
            assert "OSError: no disk" in tokenizer.decode(found.token_ids) or wrong == "flood"
            assert len(found.token_ids) - found.sampled < 400
        elif wrong == "reward":
            assert found.outcome.error == "OSError: no disk" and found.turns == 2 and found.finished
        elif wrong == "role":
            assert found.outcome.error == "it returned a message of role system; return tool or user"
            assert found.mask is None
        elif wrong in ("content", "first"):
            assert str(found.outcome.error).startswith("its messages cannot be tokenized: TypeError: ")
            assert found.mask is None and len(found.token_ids) == (6 if wrong == "content" else 1)
        elif "first" in row:
            assert "tokens with what reset returned, over data.max_prompt_length 2000" in str(found.outcome.error)
            assert len(found.token_ids) == 1
        else:
            assert (found.outcome.score, found.calls, found.bad_calls, found.turns) == (0, 0, 1, 2)


@pytest.mark.parametrize(("turns", "finished"), [(1, False), (2, True)])
def test_the_last_turn_is_still_heard(
    opened: Environment, tokenizer: Any, own: Path, turns: int, finished: bool
) -> None:
    options = [f"environment.max_turns={turns}"]
    (found,), _ = converse(opened, tokenizer, own, {"turns": [CALL % 4, "end"]}, overrides=options)
    assert (found.turns, found.calls, found.outcome.score, found.finished) == (turns, 1, 4.0, finished)
    assert found.mask is None if turns == 1 else found.mask is not None and found.mask[-1]


@pytest.mark.parametrize(("rest", "turns"), [(-1, 1), (0, 1), (1, 2), (3, 2), (4, 2)])
def test_all_tokens_of_a_conversation_count(
    opened: Environment, tokenizer: Any, own: Path, rest: int, turns: int
) -> None:
    """`again` and `end` are 6 and 4 tokens with the ends of the turns; `rest` tokens may follow the observation."""
    observed = len(opened.turns.added_ids([tokenizer.eos_token_id], [{"role": "user", "content": "And?"}]))
    limit = 6 + observed + rest
    options = [f"data.max_response_length={limit}"]
    (found,), _ = converse(opened, tokenizer, own, {"turns": ["again", "end"]}, overrides=options)
    assert found.turns == turns and found.finished == (rest == 4)
    assert len(found.token_ids) == (limit if turns == 2 else 6) and len(found.token_ids) == found.sampled + (
        observed if turns == 2 else 0
    )


def test_a_turn_that_is_cut_off_ends_the_conversation(opened: Environment, tokenizer: Any, own: Path) -> None:
    options = ["data.max_response_length=5"]
    (found,), _ = converse(opened, tokenizer, own, {"turns": ["again", "end"]}, overrides=options)
    assert (found.turns, found.finished, found.mask, len(found.token_ids)) == (1, False, None, 5)
    assert found.messages[1:] == [{"role": "assistant", "content": "again"}]
    assert found.outcome.score == 0 and found.outcome.components == {"said": 0.0}, "the environment did not hear it"


def test_reset_may_change_the_prompt(opened: Environment, tokenizer: Any, own: Path) -> None:
    rows = [{"turns": ["end"], "first": "Be quick."}, {"turns": ["end"]}]
    (changed, plain), model = converse(opened, tokenizer, own, *rows)
    assert changed.prompt is not None and plain.prompt is not None
    assert "Sum?\n\nBe quick.<|im_end|>" in tokenizer.decode(changed.prompt)
    assert [changed.messages[0]["content"], plain.messages[0]["content"]] == ["Sum?\n\nBe quick.", "Sum?"]
    assert "Sum?<|im_end|>" in tokenizer.decode(plain.prompt) and '"name": "add"' in tokenizer.decode(plain.prompt)
    assert sorted(len(asked[0].token_ids) for asked in model.asked) == sorted(map(len, (changed.prompt, plain.prompt)))


def test_environments_of_a_prompt_have_the_same_seed(opened: Environment, tokenizer: Any, own: Path) -> None:
    row = {"turns": ["end"], "wrong": "seed"}
    found, model = converse(opened, tokenizer, own, row, {**row, "seed": 77}, row, n=2)
    firsts = [str(one.messages[0]["content"]).rpartition("Seed ")[2] for one in found]
    assert firsts == ["0.", "0.", "77.", "77.", "20.", "20."], "that of its first response, or the column"
    assert len(model.asked) == 3, "their prompts are equal"


def test_metrics_of_conversations(opened: Environment, tokenizer: Any, own: Path) -> None:
    rows = [{"turns": [CALL % 1, "again", "end"]}, {"turns": ["end"]}, {"turns": ["end"], "wrong": "reward"}]
    found, _ = converse(opened, tokenizer, own, *rows)
    metrics = conversation_metrics(found)
    assert metrics["environment/turns/mean"] == pytest.approx(5 / 3) and metrics["environment/turns/max"] == 3
    assert metrics["environment/tool_calls"] == pytest.approx(1 / 3) and metrics["environment/bad_calls"] == 0
    assert (metrics["environment/errors"], metrics["environment/truncated"]) == (1, 0)
    assert conversation_metrics([Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), True)]) == {}


def test_what_does_not_fit_is_refused_at_the_start(own: Path, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "silent.py"
    file.write_text("class Silent:\n    def add(self, x: int) -> int:\n        '''Add.'''\n        return x\n")
    with pytest.raises(UserError, match=r"silent.py:Silent has no method `reward`, and no reward is set"):
        environment_of(ppo_config("reward.function=null", f"environment.name={file}:Silent"), tokenizer)
    rewriting = make_tokenizer(320)
    rewriting.chat_template = QWEN3_WITHOUT_SWITCH
    with pytest.raises(UserError, match=r"set data.chat_template to a file"):
        environment_of(config_of(own), rewriting)


def test_calls_within_the_thinking_are_not_made(own: Path) -> None:
    thinking = make_tokenizer(320)
    thinking.chat_template = OPENS_THINKING
    environment = environment_of(config_of(own, "environment.tool_format=hermes"), thinking)
    try:
        text = f"{CALL % 7}\n</think>\n\n{CALL % 1}"
        (found,), _ = converse(environment, thinking, own, {"turns": [text, "hm</think>end"]})
        assert (found.outcome.score, found.calls, found.outcome.components) == (1.0, 1, {"said": 3.0})
    finally:
        environment.close()
