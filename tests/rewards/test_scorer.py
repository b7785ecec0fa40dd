from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.errors import RunError, UserError
from tests.rewards.conftest import Open, Write, prompts

CASES = """
import os, re, signal, time, ctypes
def score(response, answer, row, prompt, factor=1):
    if response == "raise":
        raise KeyError("a", "two\\nlines")
    if response == "nan":
        return float("nan")
    if response == "text":
        return "1.0"
    if response == "nothing":
        return None
    if response == "sleep":
        time.sleep(600)
    if response == "loop":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if response == "in C":
        re.match("(a+)+b", "a" * 60)
    if response == "exit":
        os._exit(3)
    if response == "leave":
        raise SystemExit(4)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "unclosed":
        os.closerange(3, 100)
        time.sleep(600)
    return factor * (row["id"] + (response == answer) / 2 + prompt.endswith(str(row["id"])))
"""


def wait_for(reached: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_built_in_functions(opened: Open, capfd: pytest.CaptureFixture[str]) -> None:
    scores = opened(function="gsm8k").score(prompts("1", "2", None), ["#### 1", "#### 1", "#### 1"])
    assert scores.values.tolist() == [1, 0, -1] and scores.values.dtype == "float32"
    assert scores.errors == [(2, "there is no reference answer: set data.answer_key")]
    assert opened(function="exact").score([], []).values.shape == (0,)
    assert opened(function="format", kwargs={"pattern": "a.*"}).score(prompts("", ""), ["ab", "b"]).values.tolist() == [
        1,
        0,
    ]
    answers = [r"\frac{1}{2}", "3"]
    assert opened(function="math").score(prompts(*answers), [r"\boxed{0.5}", "4"]).values.tolist() == [1, 0]
    assert "warning: scoring failed, the score is -1: there is no reference answer" in capfd.readouterr().err


def test_own_function_gets_row_prompt_and_kwargs(opened: Open, write: Write) -> None:
    spec = write(CASES)
    responses = ["a", "b"] * 50
    expected = [number + (number % 2 == 0) / 2 + 1 for number in range(100)]
    assert opened(function=spec).score(prompts(*["a"] * 100), responses).values.tolist() == expected
    doubled = opened(function=spec, kwargs={"factor": 2}).score(prompts(*["a"] * 100), responses)
    assert doubled.values.tolist() == [2 * value for value in expected] and doubled.errors == []


def test_each_kind_of_failure_costs_its_own_sample_alone(
    opened: Open, write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = {
        "raise": "KeyError: ('a', 'two\\nlines')",
        "nan": "ValueError: expected a finite number, got nan",
        "text": "ValueError: expected a number, got text: '1.0'",
        "nothing": "ValueError: expected a number, got NoneType",
        "sleep": "took over 5 s and was ended",
        "loop": "took over 5 s and was ended",
        "in C": "took over 5 s and was ended",
        "exit": "ended with exit code 3",
        "leave": "SystemExit: 4",
        "segfault": "ended with exit code 139",
        "unclosed": "ended with exit code 137",
    }
    responses = [text for name in bad for text in (name, "good", "good")]
    scorer = opened(function=write(CASES), timeout_s=5)
    started = time.monotonic()
    scores = scorer.score(prompts(*["good"] * len(responses)), responses)
    assert time.monotonic() - started < 300
    assert [(responses[index], text[: len(bad[responses[index]])]) for index, text in scores.errors] == list(
        bad.items()
    )
    expected = [number + 1.5 if response == "good" else -1 for number, response in enumerate(responses)]
    assert scores.values.tolist() == expected
    warnings = capfd.readouterr().err.splitlines()
    assert next(line for line in warnings if "KeyError" in line).endswith("; response: 'raise'")
    assert "warning: scoring failed for 6 more of these 33 responses" in warnings
    assert scorer.score(prompts("a"), ["a"]).values.tolist() == [1.5]


def test_mathematics_that_never_ends(opened: Open) -> None:
    scores = opened(function="math", timeout_s=5).score(prompts("7", "7"), [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7}"])
    assert scores.values.tolist() == [-1, 1] and scores.errors == [(0, "took over 5 s and was ended")]


def test_all_of_a_batch_hanging_takes_no_longer_than_its_turns(opened: Open, write: Write) -> None:
    scorer = opened(function=write("import time\ndef score(r, a): time.sleep(600)\n"), timeout_s=0.3)
    started = time.monotonic()
    assert scorer.score(prompts(*"abcd"), list("abcd")).values.tolist() == [-1] * 4
    assert time.monotonic() - started < 300


def test_an_idle_process_that_was_killed_is_replaced(opened: Open, write: Write) -> None:
    scorer = opened(function=write("import os\ndef score(r, a): return os.getpid()\n"), workers=1)
    (pid,) = scorer.score(prompts("a"), ["a"]).values.tolist()
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: gone(int(pid)), "the process is gone")
    scores = scorer.score(prompts("a", "a"), ["a", "a"])
    assert scores.errors == [] and scores.values[0] != pid


def test_several_threads_may_score(opened: Open, write: Write) -> None:
    scorer = opened(function=write("def score(r, a): return float(r)\n"))
    found: dict[int, list[float]] = {}

    def score(first: int) -> None:
        numbers = [str(first + number) for number in range(50)]
        found[first] = scorer.score(prompts(*numbers), numbers).values.tolist()

    threads = [threading.Thread(target=score, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert found == {first: [first + number for number in range(50)] for first in (0, 100, 200)}


def test_a_function_that_cannot_be_loaded(opened: Open, write: Write) -> None:
    with pytest.raises(UserError, match="importing it raised ZeroDivisionError"):
        opened(function=write("1 / 0\ndef score(r, a): pass\n"))
    with pytest.raises(RunError, match="ended with exit code 5 while it loaded the function"):
        opened(function=write("import os\nos._exit(5)\ndef score(r, a): pass\n"))


def test_a_function_that_cannot_be_loaded_again(opened: Open, write: Write, tmp_path: Path) -> None:
    scorer = opened(function=write("import os\ndef score(r, a): os._exit(1)\n"), workers=1)
    (tmp_path / "own.py").unlink()
    with pytest.raises(UserError, match="no such file"):
        scorer.score(prompts("a", "a"), ["a", "a"])


def test_a_closed_scorer_does_not_wait_for_calls(opened: Open, write: Write) -> None:
    scorer = opened(function=write("def score(r, a): return 1\n"), workers=1)
    scorer.close()
    with pytest.raises(RunError, match="the scorer was closed while it scored"):
        scorer.score(prompts("a"), ["a"])


def test_close_ends_what_hangs_and_what_it_started(opened: Open, write: Write, tmp_path: Path) -> None:
    started = tmp_path / "pids"
    source = f"""
import os, subprocess, time
def score(r, a):
    child = subprocess.Popen(["sleep", "600"])
    open({str(started)!r}, "w").write(f"{{os.getpid()}} {{child.pid}} .")
    time.sleep(600)
"""
    scorer = opened(function=write(source), workers=1)
    raised = []

    def score() -> None:
        try:
            scorer.score(prompts("a"), ["a"])
        except RunError as error:
            raised.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    wait_for(lambda: started.exists() and started.read_text().endswith("."), "the call has begun")
    scorer.close()
    thread.join(600)
    assert raised == ["reward.function: the scorer was closed while it scored"]
    for pid in map(int, started.read_text().split()[:2]):
        wait_for(lambda pid=pid: gone(pid), f"process {pid} is gone")  # type: ignore[misc]


@pytest.mark.parametrize("busy", [True, False])
def test_processes_end_with_their_owner(write: Write, tmp_path: Path, busy: bool) -> None:
    pids = tmp_path / "pids"
    spec = write(
        f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ndef score(r, a): time.sleep(600)\n"
    )
    owner = f"""
import time
from tests.rewards.conftest import prompts
from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.rewards.scorer import open_scorer
scorer = open_scorer(OptionalRewardConfig(function={spec!r}, workers=2))
print("open", flush=True)
scorer.score(prompts("a", "b"), ["a", "b"]) if {busy} else time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        process.kill()
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: gone(pid), f"process {pid} is gone")  # type: ignore[misc]


def test_components_of_a_reward_in_a_dict(opened: Open, write: Write) -> None:
    source = """
def score(response, answer):
    if response == "broken":
        return {"format": 1.0}
    found = {"score": len(response), "format": response.startswith("<"), "note": "ignored"}
    return found if response.startswith("<") else {**found, "extra": 2}
"""
    texts = ["<a", "abc", "broken"]
    scores = opened(function=write(source)).score(prompts(*texts), texts)
    assert scores.values.tolist() == [2, 3, -1]
    assert list(scores.components) == [{"format": 1.0}, {"format": 0.0, "extra": 2.0}, {}]
    assert scores.component_means() == {"extra": 2.0, "format": 0.5}
    assert [index for index, _ in scores.errors] == [2]
    assert 'a dict with the key "score", got a dict with format' in scores.errors[0][1]


def test_a_number_has_no_components(opened: Open) -> None:
    assert opened(function="exact").score(prompts("a", "b"), ["a", "c"]).component_means() == {}


def test_scores_are_limited_and_the_score_of_failures_is_not(opened: Open, write: Write) -> None:
    source = "def score(response, answer):\n    return float(response)\n"
    for on_error in (-3.0, None):
        scorer = opened(function=write(source), clip=(-1, 0.5), on_error=on_error)
        scores = scorer.score(prompts("", "", "", ""), ["-2", "0.25", "7", "x"])
        expected = [-1.0, 0.25, 0.5, float("nan") if on_error is None else on_error]
        assert scores.values.tolist() == pytest.approx(expected, nan_ok=True)


HALF = "def score(response, answer):\n    return {'score': len(response) / 2, 'letters': len(response)}\n"


WAITS = """
import time
from pathlib import Path
def wait(response, answer, row):
    deadline = time.monotonic() + 600
    while not Path(answer).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return float(row["id"])
def write(response, answer):
    Path(answer).touch()
    return 10
"""


def test_several_functions_share_the_processes_at_the_same_time(opened: Open, write: Write, tmp_path: Path) -> None:
    waits, writes = write(WAITS, function="wait"), write(WAITS, function="write")
    scorer = opened(functions=[waits, writes, "exact"], workers=2)
    answer = str(tmp_path / "written")
    scores = scorer.score(prompts(answer), [answer])  # the call of `wait` needs that of `write` beside it
    assert scores.errors == []
    assert scores.components == [{waits: 0, writes: 10, "exact": 1}]
    assert scores.values.tolist() == [11]


def test_a_call_that_hangs_costs_its_function_alone(opened: Open, write: Write) -> None:
    hangs = write("import time\ndef score(r, a): time.sleep(600 if r == 'hang' else 0); return 1\n", "hangs.py")
    name = write(HALF)
    scorer = opened(functions=[hangs, name], timeout_s=5, on_error=None)
    scores = scorer.score(prompts(*"abc"), ["hang", "ab", "abcd"])
    assert scores.errors == [(0, f"{hangs}: took over 5 s and was ended")]
    assert scores.values.tolist() == pytest.approx([float("nan"), 2, 3], nan_ok=True)
    assert scores.components[0] == {name: 2.0, f"{name}/letters": 4.0}


def test_functions_whose_helpers_have_the_same_name_are_refused(opened: Open, tmp_path: Path) -> None:
    functions = []
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper_of_both.py").write_text(f"VALUE = {value}\n")
        source = "def score(response, answer):\n    from helper_of_both import VALUE\n    return VALUE\n"
        (tmp_path / folder / "own.py").write_text(source)
        functions.append(f"{tmp_path / folder / 'own.py'}:score")
    with pytest.raises(UserError, match=r"two/helper_of_both\.py has the name of .*one/helper_of_both\.py"):
        opened(functions=functions)


def test_several_functions_add_up_with_their_weights(opened: Open, write: Write) -> None:
    name = write(HALF)
    scorer = opened(functions=["exact", name], weights=[2, -3], clip=(-4, 9), on_error=None)
    scores = scorer.score(prompts("ab", "ab", "ab"), ["ab", "a", "abcdef"])
    assert scores.values.tolist() == [2 - 3, -1.5, -4]
    assert scores.components[0] == {"exact": 1.0, name: 1.0, f"{name}/letters": 2.0}
    assert opened(functions=["exact", name]).score(prompts("ab"), ["ab"]).values.tolist() == [2]  # weights of 1


def test_a_response_that_one_of_several_functions_fails_on_has_no_score(
    opened: Open, write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    name = write("def score(response, answer):\n    return float(response)\n")
    for on_error in (-3.0, None):
        scorer = opened(functions=["exact", name], on_error=on_error)
        scores = scorer.score(prompts("1", "x"), ["1", "x"])
        assert scores.values.tolist() == pytest.approx([2, on_error or float("nan")], nan_ok=True)
        assert scores.errors == [(1, f"{name}: ValueError: could not convert string to float: 'x'")]
        assert scores.components[1] == {"exact": 1.0}
        then = "the response is left out" if on_error is None else "the score is -3"
        assert f"scoring failed, {then}: ValueError" in capfd.readouterr().err


def test_each_of_several_functions_has_its_own_arguments(opened: Open, write: Write) -> None:
    name = write("def score(response, answer, bonus):\n    return bonus\n")
    scorer = opened(functions=["format", name], kwargs={"format": {"pattern": "a+"}, name: {"bonus": 5}})
    assert scorer.score(prompts("", ""), ["aa", "b"]).values.tolist() == [6, 5]
