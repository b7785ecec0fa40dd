"""Work on text from outside grows as its length: logs, responses of models, data, messages of Slurm and Ray.

The regular expressions are found in the source, so a new one is tested too. What makes one slow follows from its parts:
each repetition is fed a text that begins as the expression does, then repeats what the repetition takes, and ends with
what it does not take. Functions with loops of their own are in FUNCTIONS.
"""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

import pytest

from hpc_rl.data.reading.formats import read_rows
from hpc_rl.data.templates.assistant_text import find_spans
from hpc_rl.data.templates.turn_ends import Ends, TurnEnd
from hpc_rl.doctor import diagnosis, training
from hpc_rl.environments import tool_calls
from hpc_rl.errors import UserError
from hpc_rl.liveness import flight_records
from hpc_rl.node.hangs import stack_files
from hpc_rl.node.health.trials import last_words
from hpc_rl.rewards import exact, gsm8k
from hpc_rl.rl.actors import deaths
from hpc_rl.slurm import allocation, cluster, states
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.tracking.samples import read_samples

ROOT = Path(__file__).parents[1] / "hpc_rl"
LENGTH = 400_000
LIMIT_S = 15.0
"""Processor time for one text. Linear work takes at most 1.2 s here; quadratic work, minutes."""


REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)


class TooSlow(BaseException):
    """No handler of the product catches it."""


@contextmanager
def limited() -> Iterator[None]:
    """Interrupt the block after LIMIT_S seconds of this process's own time, which other processes do not change."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def filled(first: str, unit: str, last: str) -> str:
    return first + unit * (LENGTH // len(unit)) + last


def sample(pattern: Any) -> str:
    """Return a short text that a parsed expression matches, apart from its conditions on what is around."""
    return "".join(_sample(operation, value) for operation, value in pattern)


def _sample(operation: Any, value: Any) -> str:
    if operation is ops.LITERAL:
        return chr(value)
    if operation is ops.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if operation is ops.ANY:
        return "a"
    if operation is ops.IN:
        return members(value)[0]
    if operation is ops.BRANCH:
        return sample(value[1][-1])
    if operation is ops.SUBPATTERN:
        return sample(value[3])
    if operation is ops.ATOMIC_GROUP:
        return sample(value)
    if operation in REPEATS:
        return sample(value[2]) * max(int(value[0]), 1)
    return ""


def members(items: Any) -> list[str]:
    """Return one character of each kind that a set of characters has."""
    allowed = re.compile(_set_of(items))
    return [char for char in "a0 (<[{.,-/:=\"'`\n_~$%A\t" if allowed.match(char)] or ["a"]


def _set_of(items: Any) -> str:
    text = ""
    classes = {ops.CATEGORY_SPACE: r"\s", ops.CATEGORY_DIGIT: r"\d", ops.CATEGORY_WORD: r"\w"}
    classes |= {ops.CATEGORY_NOT_SPACE: r"\S", ops.CATEGORY_NOT_DIGIT: r"\D", ops.CATEGORY_NOT_WORD: r"\W"}
    for operation, value in items:
        if operation is ops.NEGATE:
            text += "^"
        elif operation is ops.LITERAL:
            text += re.escape(chr(value))
        elif operation is ops.RANGE:
            text += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        else:
            text += classes[value]
    return f"[{text}]"


def attacks(pattern: Any, begin: str = "") -> Iterator[str]:
    """Yield texts that are slow for an expression with adjacent or nested repetitions, or with a late condition."""
    for operation, value in pattern:
        if operation is ops.BRANCH:
            for branch in value[1]:
                yield from attacks(branch, begin)
        elif operation is ops.SUBPATTERN:
            yield from attacks(value[3], begin)
        elif operation is ops.ATOMIC_GROUP:
            yield from attacks(value, begin)
        elif operation in REPEATS and value[1] > 1:
            yield from attacks(value[2], begin)
            for unit in units(value[2], begin):
                yield from (filled(begin, unit, last) for last in ("", "\0"))
            yield from (filled("", begin + last, "\0") for last in ("", "\n") if begin)
        begin += _sample(operation, value)
    if begin:
        yield filled("", begin, "\0")


def units(pattern: Any, begin: str) -> list[str]:
    """Return texts that a repeated part matches."""
    operation, value = pattern[0] if len(pattern) == 1 else (None, None)
    if operation is ops.IN:
        return members(value)
    return ["a", begin or "a"] if operation is ops.ANY else [sample(pattern) or "a"]


def text_of(node: ast.AST, named: dict[str, str]) -> str | None:
    """Return the text of a pattern; a part that is only known when the program runs becomes a word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value.decode() if isinstance(node.value, bytes) else node.value
    if isinstance(node, ast.Name):
        return named.get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "word" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(part, named) for part in (node.left, node.right)]
        return None if None in parts else "".join(part or "" for part in parts)
    return None


def expressions() -> dict[str, tuple[set[str], str, int]]:
    """Return every regular expression of the product: place -> (functions that use it, pattern, flags)."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        assigned = [
            (node.targets[0].id, node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        named = {name: text for name, value in assigned if (text := text_of(value, {})) is not None}
        used = {
            (node.value.id, node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        compiled = {id(value): name for name, value in assigned}
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), function), [first, *others], keywords) if (
                    function != "escape"
                ):
                    if (pattern := text_of(first, named)) is not None:
                        functions = {use for name, use in used if name == compiled.get(id(node))} or {function}
                        found[f"{path.relative_to(ROOT)}:{node.lineno}"] = (
                            functions,
                            pattern,
                            flags_in(others, keywords),
                        )
    return found


def flags_in(others: list[ast.expr], keywords: list[ast.keyword]) -> int:
    words = [word for each in [*others, *(key.value for key in keywords)] for word in ast.walk(each)]
    names = {word.attr for word in words if isinstance(word, ast.Attribute) and word.attr.isupper()}
    return sum(getattr(re, name) for name in names)


EXPRESSIONS = expressions()


def test_the_expressions_of_the_source_are_found() -> None:
    assert len(EXPRESSIONS) > 100
    assert any("rank\\d" in pattern for _, pattern, _ in EXPRESSIONS.values())


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_every_regular_expression_takes_time_that_grows_as_the_text(place: str) -> None:
    functions, pattern, flags = EXPRESSIONS[place]
    compiled = re.compile(pattern, flags)
    how = compiled.search
    if functions <= {"match", "fullmatch"}:
        how = compiled.match if "match" in functions else compiled.fullmatch
    for text in dict.fromkeys(attacks(parser.parse(pattern, flags))):
        with limited():
            try:
                how(text)
            except TooSlow:
                pytest.fail(f"{place}: {pattern} is slow for {text[:60]!r}, repeated")


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[str, Path], object]:
    def act(text: str, folder: Path) -> object:
        (folder / name).write_text(text)
        return read(folder / name)

    return act


def of_text(read: Callable[[str], object]) -> Callable[[str, Path], object]:
    return lambda text, _folder: read(text)


def rewritten(messages: list[dict[str, Any]], generation_prompt: bool) -> str:
    """Render a chat as templates do that remove the thinking of earlier turns."""
    contents = [message["content"].rpartition("</think>")[2] for message in messages[:-1]] + [messages[-1]["content"]]
    turns = [f"<{message['role']}>{text}<end>" for message, text in zip(messages, contents, strict=True)]
    return "".join(turns) + ("<assistant>" if generation_prompt else "")


def spans_of(text: str) -> list[tuple[int, int]]:
    asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": f"<think>{text}</think>{text}"}
    return find_spans(rewritten, [asked, said, asked, said], Ends(TurnEnd("<end>"), None), "").spans


COMMON = (("", "a"), ("", " "), ("", "\n"), ("", "\n "), ("", "{"), ("", "9,"))
LOGS = (
    *(("", unit) for unit in ("hpc-rl: a\n", "hpc-rl: a\n    b\n", "\t", "Traceback", "KeyError: a\n", "(a pid=1) ")),
    *(("", unit) for unit in ("does not see ", "hpc-rl: lost ", "Failed to register worker ", "pool needs ", "died: ")),
    *(
        ("", unit)
        for unit in ("rollout_probs_diff_mean: ", "Connection reset by peer\nAError: a\n", "DUE TO JOB REQUEUE ")
    ),
    ("hpc-rl: a\n", "    b\n"),
    ("hpc-rl: a\n    ", "b "),
    ("srun: error: ", "a"),
    ("rollout_probs_diff_mean: ", "0"),
)
TOOLS = (
    *(
        ("", unit)
        for unit in ("<tool_call>", "<tool_call></tool_call>", '<tool_call>{"a":', "<function=a>", "```\n", "{}")
    ),
    *(
        ("", unit)
        for unit in ("<function=a><parameter=b>", "<function=", '{"name":"a","arguments":{}};', '{"a":1}', "[[")
    ),
    *(("", unit) for unit in ('<tool_call>"</tool_call>', "<parameter=b></parameter>", '{"name":', "<function=a> ")),
    ("```", " "),
    ("```json\n", "```json"),
    ("<function=a>", "<parameter=b></parameter>"),
    ("<tool_call>", " "),
    ('{"name":"a","arguments":{}}', " "),
)
FUNCTIONS: dict[str, tuple[Callable[[str, Path], object], tuple[tuple[str, str], ...]]] = {
    "explain FILE": (of_file("job.log", diagnosis.explain_file), LOGS),
    "known failures": (
        of_text(lambda text: diagnosis.findings([diagnosis.LogText("log", text)])),
        LOGS,
    ),
    "the last lines": (of_text(diagnosis.last_lines), LOGS),
    "the job's last message": (of_text(diagnosis.last_message), LOGS),
    "a page for bug reports": (
        of_text(lambda text: training.anonymous(text, ["n1"], Path("/home/me"), "me")),
        (("", "/a"), ("", " /a/b"), ("", "1.1.1."), ("/", "a"), ("1.1.1.1", "a"), ("", "n1"), ("", "hf_")),
    ),
    "stacks": (of_text(stack_files.waits_for_others), (("", 'File "'), ("", "Thread 0x"), ('File "', "/torch"))),
    "the last words of a trial": (of_file("trial.log", last_words), LOGS),
    "how an actor died": (
        of_text(lambda text: deaths.death_cause(deaths.Evidence(text, log=text), "engine")),
        (
            ("", "ip: "),
            (" ", "\npid: "),
            ("", "\n "),
            ("*** ", "SIG"),
            ("", "Worker exit type: A Worker exit detail: "),
        ),
    ),
    "gsm8k": (
        of_text(gsm8k.extract),
        (("#### ", "1,"), ("", "1,000,"), ("", "123,456"), ("", "-$"), ("####", "#### ")),
    ),
    "gsm8k, a reference": (of_text(lambda text: gsm8k.score("5", text)), (("#### ", "9"), ("", "1,000,"))),
    "exact": (of_text(exact.extract), ()),
    "calls, hermes": (of_text(tool_calls.parse_hermes), TOOLS),
    "calls, JSON": (of_text(tool_calls.parse_json), TOOLS),
    "calls, XML": (of_text(tool_calls.parse_xml), TOOLS),
    "thinking": (of_text(lambda text: tool_calls.after_thinking(text, True)), (("", "<think>"), ("", "</think>"))),
    "scontrol": (
        of_text(states.read_scontrol),
        (("JobState=", " "), ("", "Reason=a "), ("", "A="), ("JobState=a ", "a")),
    ),
    "a job script": (
        of_text(lambda text: states.run_dir_of_script(text, "HERE", {})),
        (("export HERE=", "a"), ("export", " "), ("HERE='", "'"), ("HERE=", "$a")),
    ),
    "hosts": (
        of_text(allocation.expand_hostlist),
        (
            ("n[0-9]", "[0-9]"),
            ("", "n[0-9999],"),
            ("n[1", ",1"),
            ("n[0-", "9"),
            ("", "n["),
            ("", "]["),
            ("n[1]", "[1]"),
        ),
    ),
    "tasks of an array": (
        of_text(lambda text: states.read_squeue(text, "12_1")),
        (("12_[", "1,"), ("12_[0-", "9"), ("", "1|")),
    ),
    "generic resources": (of_text(cluster.parse_gpus), (("", "("), ("gpu:", "a"), ("gpu:", "1"), ("", "gpu:a:1,"))),
    "controllers": (
        of_text(cluster.read_controllers),
        (("", "Slurmctld("), ("", "Slurmctld(a) at "), ("Slurmctld(\n", "a")),
    ),
    "turns of a chat": (of_text(spans_of), (("", "ab"), ("", "<end>"), ("", "</think>"), ("b", "a"))),
    "rows, lines": (
        of_file("a.jsonl", lambda path: list(read_rows(path))),
        (("", '{"a":1}\n'), ("{", '"a":1,'), ("", "[")),
    ),
    "rows, an array": (
        of_file("a.json", lambda path: list(read_rows(path))),
        (("[", '{"a":1},'), ("[", " "), ('[{"a":1}', " "), ('[{"a":1}', "\n")),
    ),
    "rows, csv": (of_file("a.csv", lambda path: list(read_rows(path))), (("a\n", "b\n"), ('a\n"', '""'), ("", "a,"))),
    "metrics": (
        of_file("metrics.jsonl", read_metrics),
        (("", '{"step": 1, "a": 2}\n'), ('{"step": ', "9"), ('{"step": 1, ', '"a": 1, ')),
    ),
    "samples": (of_file("samples.jsonl", read_samples), (("", '{"step": 1}\n'),)),
    "a flight record": (
        of_file("flight-rank0", lambda path: flight_records.read_record(path)),
        (("", "("), ("", "\x80")),
    ),
}
"""What reads text from outside with loops or several expressions -> (call, beginnings and repeated parts)."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_reader_takes_time_that_grows_as_the_text(name: str, tmp_path: Path) -> None:
    act, own = FUNCTIONS[name]
    for first, unit in (*own, *COMMON):
        for last in ("", "\0"):
            with limited():
                try:
                    act(filled(first, unit, last), tmp_path)
                except TooSlow:
                    pytest.fail(f"{name} is slow for {first!r} and then {unit!r}, repeated")
                except (ValueError, UserError):  # refused in time
                    pass


def test_many_keys_of_one_row_are_no_work_for_each_pair(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    names = [f'"{number}": 1' for number in range(LENGTH // 10)]
    file.write_text("{" + ", ".join([*names, names[-1]]) + "}")
    with limited(), pytest.raises(UserError, match="appears twice"):
        list(read_rows(file))


def test_a_range_of_hosts_is_refused_before_it_is_expanded() -> None:
    for text in ("n[0-999999999]", "n[0-99999]", "n" + "[0-9]" * 6, "n[0-65535],m"):
        with limited(), pytest.raises(ValueError, match="names"):
            allocation.expand_hostlist(text)
    assert len(allocation.expand_hostlist("n[0-65535]")) == allocation.MOST_NODES
