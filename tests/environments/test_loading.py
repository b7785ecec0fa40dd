from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.rl import environment as options
from hpc_rl.environments.loading import ENVIRONMENT, SHIPPED, TOOLS, check_name, load_definition
from hpc_rl.environments.protocol import Definition, Episode
from hpc_rl.environments.sandbox import RUNNERS
from hpc_rl.environments.tool_calls import PARSERS, VLLM, ToolCall
from hpc_rl.errors import UserError
from tests.environments.conftest import Write

ADD = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b
'''
OWN = '''
class Base:
    def double(self, x: float) -> float:
        """Double a number."""
        return 2 * x

class Own(Base):
    def __init__(self, start: int = 0):
        self.total = start

    def add(self, x: int) -> int:
        """Add to the total."""
        self.total += x
        return self.total

    @staticmethod
    def shout(text: str) -> str:
        """Write in capitals."""
        return text.upper()

    def _hidden(self): ...
    VALUE = 3

    def reward(self):
        return self.total
'''


def refused(environment: str | None, *, kwargs: dict[str, Any] | None = None, tools: list[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_definition(environment, kwargs or {}, tools or [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_methods_are_tools_of_each_object(write: Write) -> None:
    definition = load_definition(write(OWN), {"start": 5})
    assert list(definition.tools) == ["double", "add", "shout"]
    assert definition.has_reward and not definition.has_step
    one, two = Episode(definition, 100), Episode(definition, 100)
    calls = [ToolCall("add", {"x": 2}), ToolCall("double", {"x": 2}), ToolCall("shout", {"text": "a"})]
    assert [message["content"] for message in one.answer("", calls).messages] == ["7", "4.0", "A"]
    assert one.result().score == 7 and two.result().score == 5


def test_functions_with_and_without_an_environment(write: Write) -> None:
    alone = load_definition(None, {}, [write(ADD, "add", "tools.py")])
    assert Episode(alone, 100).answer("", [ToolCall("add", {"a": 1})]).messages[0]["content"] == "2"
    assert Episode(alone, 100).reset({"a": 1}) is None and Episode(alone, 100).result().score is None
    both = refused(write(OWN), tools=[write(ADD, "add", "tools.py")])
    assert "add is a method of it and a function in environment.tools" in both
    twice = refused(None, tools=[write(ADD, "add", "tools.py"), write(ADD, "add", "other.py")])
    assert "another tool with the name add" in twice


def test_a_function_that_creates_the_environment(write: Write) -> None:
    spec = write(OWN + "\ndef make(start: int) -> Own:\n    return Own(start + 1)\n", "make")
    assert Episode(load_definition(spec, {"start": 1}), 100).result().score == 2
    assert "created with no arguments" in refused(spec)
    assert "created with stop=..." in refused(spec, kwargs={"stop": 1})
    assert "without the class that it returns: annotate it" in refused(write("def make(): ...", "make"))


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("class Owl: ...", ["no 'Own' in", "did you mean Owl?"]),
        ("class Other: ...", ["it has Other"]),
        ("Own = 3", ["is a number, but a class is needed"]),
        ("Own = int('3')", ["is int, but a class is needed"]),
        ("async def Own(): ...", ["is an async function"]),
        ("class Own:", ["cannot be read as Python"]),
        ("1 / 0\nclass Own: ...", ["importing it raised ZeroDivisionError"]),
        ("import no_such_module\nclass Own: ...", ["needs no_such_module, which is not installed"]),
        ("class Own:\n  def reset(self): ...", ["neither tools nor a method `step`", "step(text)"]),
        ("class Own:\n  def f(self, x):\n    'Do.'", ["the parameter x of the tool f has no type", "x: str"]),
        ("class Own:\n  def f(self, x: int): ...", ["the tool f has no docstring"]),
        ("class Own:\n  def f(self, *x: int):\n    'Do.'", ["the tool f has the parameter *x", "by its name"]),
        ("class Own:\n  def f(self, x: int, /):\n    'Do.'", ["has the parameter x"]),
        ("class Own:\n  def f(self, **x: int):\n    'Do.'", ["has the parameter **x"]),
        ("class Own:\n  async def f(self, x: int):\n    'Do.'", ["the tool f is an async function"]),
        ("class Own:\n  def f(self, x: 'No'):\n    'Do.'", ["the types of the tool f cannot be read"]),
        ("class Own:\n  def f(self, x: type(Ellipsis)):\n    'Do.'", ["a type that JSON does not have"]),
        ("class Own:\n  async def step(self, text): ...", ["step is an async method"]),
        ("class Own:\n  def step(self): ...", ["step is called as step(text)"]),
        ("class Own:\n  def step(self, text, more): ...", ["step is called as step(text)"]),
    ],
)
def test_what_is_refused(write: Write, source: str, parts: list[str]) -> None:
    text = refused(write(source + "\n"))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("no/such.py:Own", "no such file: no/such.py"),
        ("mine", "expected the form package.module:Name"),
        ("mine.py:", "expected the form"),
        (":Own", "expected the form"),
    ],
)
def test_names(spec: str, part: str) -> None:
    assert part in refused(spec)
    with pytest.raises(UserError, match=part):
        check_name(ENVIRONMENT, spec, same_python=True)


def test_a_class_is_no_tool_and_something_is_needed(write: Write) -> None:
    spec = write(OWN)
    assert "is a class, but a function is needed" in refused(None, tools=[spec])
    with pytest.raises(UserError, match="is a class, but a function is needed"):
        check_name(TOOLS, spec, same_python=True)
    assert check_name(ENVIRONMENT, spec, same_python=True) is None
    assert "both empty" in refused(None)
    assert "when the job starts" in (check_name(TOOLS, "not_here:f", same_python=False) or "")


def test_a_gymnasium_class(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library's base class has public methods, which are no tools, even if they are overridden.
    (tmp_path / "gymnasium.py").write_text("class Env:\n  def render(self): ...\n  def get_attribute(self, x): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = """
import gymnasium
class Own(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return "start", {}
    def step(self, action):
        return "next", 0.5, False, action == "stop", {}
    def render(self): ...
"""
    definition: Definition = load_definition(write(source), {})
    monkeypatch.delitem(sys.modules, "gymnasium")
    assert not definition.tools and definition.has_step
    episode = Episode(definition, 100)
    assert episode.reset({"question": "x"}) == "start"
    assert not episode.answer("go", []).done and episode.answer("stop", []).done
    assert episode.result().score == 1.0


def test_imports_are_light() -> None:
    heavy = "{'torch', 'transformers', 'ray', 'vllm', 'numpy'}"
    code = (
        "import sys, hpc_rl.environments.loading, hpc_rl.environments.tool_calls; "
        f"sys.exit(str(sys.modules.keys() & {heavy}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stderr.strip() == "set()"


def test_the_options_list_what_there_is() -> None:
    assert ("auto", *PARSERS) == options.TOOL_FORMATS and options.VLLM_FORMAT == VLLM
    assert ("auto", *RUNNERS) == options.SANDBOXES and tuple(SHIPPED) == options.SHIPPED_TOOLS


def test_shipped_tools_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_name(TOOLS, "python", same_python=True) is None
    with pytest.raises(UserError, match=r"environment.name python: expected the form"):
        check_name(ENVIRONMENT, "python", same_python=True)
    with pytest.raises(UserError, match=r"environment.tools perl: expected python or bash, or the form"):
        check_name(TOOLS, "perl", same_python=True)
    monkeypatch.setenv("PATH", "/nowhere")
    for sandbox, part in (("bwrap", "no bwrap on PATH"), ("auto", "no apptainer"), ("apptainer:/none", "no apptainer")):
        with pytest.raises(UserError, match=part):
            load_definition(None, {}, ["bash"], sandbox)
