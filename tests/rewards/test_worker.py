from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.rewards.check import check_function, check_url
from hpc_rl.rewards.worker import load_function
from tests.rewards.conftest import Write

OWN = """
import helper_of_rewards
def score(response, answer, weight=1.0):
    return weight * helper_of_rewards.same(response, answer)
"""


def both(spec: str, kwargs: dict[str, Any] | None = None) -> str:
    """The one line that check_function and load_function both refuse with."""
    texts = []
    for call in (
        lambda: check_function(spec, kwargs or {}, same_python=True),
        lambda: load_function(spec, kwargs or {}),
    ):
        with pytest.raises(UserError) as caught:
            call()
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "\n" not in texts[0] and texts[0].startswith("reward.")
    return texts[0]


def test_own_file_with_and_without_kwargs(write: Write) -> None:
    write("def same(a, b): return a == b\n", name="helper_of_rewards.py")
    spec = write(OWN)
    assert check_function(spec, {}, same_python=True) is None
    assert load_function(spec, {})("a", "a") == 1.0
    assert load_function(spec, {"weight": 3})("a", "a") == 3.0


def test_own_module(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards" / "deep").mkdir(parents=True)
    write("raise SystemExit('imported')\n", name="my_rewards/__init__.py")
    write("def score(response, answer): return 1\n", name="my_rewards/deep/er.py")
    monkeypatch.chdir(tmp_path)
    assert check_function("my_rewards.deep.er:score", {}, same_python=True) is None  # nothing of it was run
    with pytest.raises(UserError, match="did you mean score"):
        check_function("my_rewards.deep.er:scor", {}, same_python=True)
    with pytest.raises(UserError, match=r"no module 'my_rewards\.deep\.err'"):
        check_function("my_rewards.deep.err:score", {}, same_python=True)
    with pytest.raises(UserError, match=r"no module 'my_rewards\.deep\.er\.x'"):
        check_function("my_rewards.deep.er.x:score", {}, same_python=True)
    write("", name="my_rewards/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("my_rewards.deep.er:score", {})("", "") == 1


@pytest.mark.parametrize(
    ("name", "whose"), [("random", "a module of Python"), ("numpy", ".*/numpy"), ("sys", "a module of Python")]
)
def test_own_module_with_the_name_of_another(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whose: str
) -> None:
    write("def score(response, answer): return 1\n", name=f"{name}.py")
    monkeypatch.chdir(tmp_path)
    said = rf"{name}\.py has the name of {whose}, which is imported instead: .* path/{name}\.py:score"
    assert re.search(said, both(f"{name}:score"))
    assert load_function(f"{name}.py:score", {})("", "") == 1


def test_a_plain_folder_gives_way_to_an_installed_module(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes a folder without __init__.py as a package only if no other module has its name."""
    monkeypatch.chdir(tmp_path)
    write("def score(response, answer): return 2\n", name="installed/judge/rewards.py")
    write("", name="installed/judge/__init__.py")
    write("def score(response, answer): return 3\n", name="installed/parts/theirs.py")  # a namespace package
    monkeypatch.syspath_prepend(tmp_path / "installed")
    write("", name="judge/README.py")  # a clone of its repository, for example
    assert check_function("judge.rewards:score", {}, same_python=True) is None
    assert load_function("judge.rewards:score", {})("", "") == 2
    write("def score(response, answer): return 4\n", name="parts/mine.py")
    for name in ("theirs", "mine"):
        assert check_function(f"parts.{name}:score", {}, same_python=True) is None
    monkeypatch.syspath_prepend(tmp_path)
    assert [load_function(f"parts.{name}:score", {})("", "") for name in ("theirs", "mine")] == [3, 4]
    write("def score(response, answer): return 5\n", name="judge/own.py")
    write("def score(response, answer): return 6\n", name="judge/rewards.py")
    for name in ("own", "rewards"):
        with pytest.raises(UserError, match=rf"judge/{name}\.py has the name of .*/installed/judge, which is imported"):
            check_function(f"judge.{name}:score", {}, same_python=True)


def test_a_module_of_another_python_is_left_to_the_job() -> None:
    with pytest.raises(UserError, match="no module 'not_here'"):
        check_function("not_here.rewards:score", {}, same_python=True)
    assert "when the job starts" in (check_function("not_here.rewards:score", {}, same_python=False) or "")
    assert "when the job starts" in (check_function("math:sqrt", {}, same_python=True) or "")
    with pytest.raises(UserError, match="needs not_here, which is not installed"):
        load_function("not_here.rewards:score", {})


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("gsm8", ["did you mean gsm8k?"]),
        ("mine", ["expected one of exact, format, gsm8k, math, or package.module:function"]),
        ("mine.py", ["package.module:function"]),
        ("mine.py:", ["expected the form"]),
        (":score", ["expected the form"]),
        ("a b:score", ["expected the form"]),
        ("no/such.py:score", ["no such file: no/such.py"]),
    ],
)
def test_no_such_function(spec: str, parts: list[str]) -> None:
    assert all(part in both(spec) for part in parts)


@pytest.mark.parametrize(
    ("source", "kwargs", "parts"),
    [
        ("def scores(r, a): pass", {}, ["no 'score' in", "did you mean scores?"]),
        ("def other(r, a): pass", {}, ["it has other"]),
        ("x = 1", {}, ["it has no function"]),
        ("def score(r): pass", {}, ["(r)", "too many positional", "def score(response: str, answer, **kwargs)"]),
        ("def score(r, a, b): pass", {}, ["(r, a, b)", "missing a required argument: 'b'", "reward.kwargs"]),
        ("def score(r, a, *, b): pass", {"c": 1}, ["(r, a, *, b)", "c=..."]),
        ("def score(r, a, b=1): pass", {"c": 1}, ["unexpected keyword argument 'c'"]),
        ("def score(r, a, row): pass", {"row": 1}, ["reward.kwargs.row"]),
        ("def score(*, response, answer): pass", {}, ["too many positional"]),
        ("async def score(r, a): pass", {}, ["is an async function"]),
        ("class score: pass", {}, ["a class"]),
        ("def score(r, a:", {}, ["cannot be read as Python, line 1"]),
        ("if True:\n    def score(r): pass", {}, ["too many positional"]),
    ],
)
def test_a_function_that_cannot_be_called(write: Write, source: str, kwargs: dict[str, Any], parts: list[str]) -> None:
    text = both(write(source + "\n"), kwargs)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    "source",
    [
        "def score(r, a, **kwargs): return 1",
        "def score(*args, b, row, prompt): return 1",
        "def score(r, a, /, b=2, *, c=3, row=None): return 1",
        "from functools import partial\ndef f(r, a, b, c): return 1\nscore = partial(f, c=1)",
        "try:\n    import no_such_module\nexcept ImportError:\n    def score(r, a, b): return 1",
        "def double(f):\n    return lambda r, a, **k: f(r)\n@double\ndef score(r): return 1",
    ],
)
def test_signatures_that_fit(write: Write, source: str) -> None:
    spec = write(source + "\n")
    assert check_function(spec, {"b": 1}, same_python=True) is None
    assert load_function(spec, {"b": 1})("", None, **({"row": {}, "prompt": ""} if "prompt" in source else {})) == 1


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("score = int('3')", "is int, but a function is needed"),
        ("from string import *", "no 'score'"),
        ("def score(r, a): pass\n1 / 0", "importing it raised ZeroDivisionError: division by zero"),
        ("import no_such_module\ndef score(r, a): pass", "needs no_such_module, which is not installed"),
        ("score = lambda r: 1", "too many positional"),
    ],
)
def test_what_only_loading_shows(write: Write, source: str, part: str) -> None:
    spec = write(source + "\n")
    assert check_function(spec, {}, same_python=True) is None
    with pytest.raises(UserError) as caught:
        load_function(spec, {})
    assert part in str(caught.value)


def test_the_kwargs_of_built_in_functions() -> None:
    assert "missing a required argument: 'pattern'" in both("format")
    assert "is not a regular expression" in both("format", {"pattern": "("})
    assert "unexpected keyword argument 'x'" in both("gsm8k", {"x": 1})
    assert all(check_function(name, {}, same_python=True) is None for name in ("exact", "gsm8k", "math"))


def test_a_near_file(write: Write) -> None:
    write("def score(r, a): pass\n", name="rewards.py")
    assert "rewards.py?" in both(write("", name="x.py").replace("x.py", "reward.py"))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/x", "http://", "http://host:99999/", "http://a b/", "x"])
def test_urls(url: str) -> None:
    check_url("http://node1:8000/score")
    with pytest.raises(UserError, match="http://host:port/path"):
        check_url(url)


def test_checks_are_light() -> None:
    heavy = "{'numpy', 'torch', 'transformers', 'ray'}"
    code = f"import sys, hpc_rl.rewards.check, hpc_rl.rewards.worker; sys.exit(str(sys.modules.keys() & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("parameters", ["solution, ground_truth", "answer, reference=None", "label, answer, **kwargs"])
def test_a_response_may_be_called_as_an_answer(write: Write, parameters: str) -> None:
    check_function(write(f"def score({parameters}):\n    return 0.0\n"), {}, same_python=True)


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ("prompts, completions, **kwargs", "has the parameter completions, as reward functions of TRL"),
        ("completions, **kwargs", "receive lists, and return a list"),
        ("completions, solution, **kwargs", "docs/from-trl.md"),
        ("prompts, completion_ids, **kwargs", "has the parameter prompts"),
        ("queries, prompts, labels=None", "TRL and OpenRLHF"),
        ("*, completions=(), **kwargs", "has the parameter completions"),
        ("ground_truth, response", "called with (response, answer) in this order"),
    ],
)
def test_functions_of_other_projects_are_refused(write: Write, parameters: str, part: str) -> None:
    """By the check of a login node, and by loading, which sees what a decorator returns too."""
    plain = f"def score({parameters}):\n    return [0.0]\n"
    for source in (plain, f"def same(f):\n    return f\n@same\n{plain}"):
        spec = write(source)
        with pytest.raises(UserError) as caught:
            load_function(spec, {}) if "@" in source else check_function(spec, {}, same_python=True)
        assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_function_for_one_data_set_of_verl_fits(write: Write) -> None:
    function = load_function(
        write("def score(solution_str, ground_truth, extra_info=None):\n    return ground_truth\n"), {}
    )
    assert function("response", 3) == 3
