from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.rewards import exact, gsm8k
from hpc_rl.rewards import format as form
from hpc_rl.rewards import math as maths
from hpc_rl.rewards.number import to_score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("so 3 * 4 = 12\n#### 12", "12", 1),
        ("#### 12 and not 13", "12", 1),
        ("#### 11\nno wait\n#### 12", "12", 1),
        ("#### twelve, that is 12", "12", 1),
        ("First 5, then 12.", "12", 1),
        ("First 12, then 5.", "12", 0),
        ("#### $1,200.00", "1200", 1),
        ("#### 1200", "1,200", 1),
        ("It costs $ 18.", "18", 1),
        ("a rise of 50%", "50", 1),
        ("#### -7", "-7", 1),
        ("#### −7", "-7", 1),
        ("#### -$7", "-7", 1),
        ("#### $-7", "-7", 1),
        ("12-7", "7", 1),
        ("#### .5", "0.5", 1),
        ("#### 0.50", "0.5", 1),
        ("#### 5", "0.5", 0),
        ("", "12", 0),
        ("no number ####", "12", 0),
        ("12", 12, 1),
        ("12", 12.0, 1),
        ("#### 12", "3 * 4 = <<3*4=12>>12\n#### 12", 1),
    ],
)
def test_gsm8k(response: str, answer: object, score: float) -> None:
    assert gsm8k.score(response, answer) == score


def test_gsm8k_is_linear_in_the_response() -> None:
    assert gsm8k.score("1," * 50_000 + "-" * 50_000 + "#" * 50_000, "2") == 0


@pytest.mark.parametrize("function", [gsm8k.score, exact.score, maths.score])
def test_no_reference_answer(function: object) -> None:
    with pytest.raises(ValueError, match=r"data\.answer_key"):
        function("12", None)  # type: ignore[operator]


def test_an_answer_that_is_no_answer() -> None:
    with pytest.raises(ValueError, match="'twelve' has no number"):
        gsm8k.score("12", "twelve")
    with pytest.raises(ValueError, match="not readable as mathematics"):
        maths.score("12", "$$")


def test_exact() -> None:
    assert exact.score(" 12\n", "12") == 1 and exact.score("12", 12) == 1
    assert exact.score("12.", "12") == 0 and exact.score("a  b", "a b") == 0


def test_format() -> None:
    pattern = r"<think>.*</think>\s*\S.*"
    assert form.score("<think>a\nb</think>\n12", None, pattern) == 1
    assert form.score("x <think>a</think> 12", None, pattern) == 0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"So \boxed{1/2}.", r"\frac{1}{2}", 1),
        (r"So \boxed{0.5}.", r"$\frac12$", 1),
        (r"First \boxed{3}, but then \boxed{4}", "4", 1),
        (r"First \boxed{4}, but then \boxed{3}", "4", 0),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", 1),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1),
        (r"\boxed{(1, 2)}", r"(2, 1)", 0),
        (r"\boxed{50\%}", r"50\%", 1),
        (r"\boxed{1{,}000}", "1000", 1),
        ("The final answer is $7$. I hope it is correct.", "7", 1),
        ("The answer is 7", r"\boxed{7}", 1),
        ("I do not know", "7", 0),
        ("", "7", 0),
        (r"\boxed{", "7", 0),
        (r"\boxed{\frac{1}{}}", "7", 0),
        (r"\boxed{7}", 7, 1),
    ],
)
def test_math(response: str, answer: object, score: float) -> None:
    assert maths.score(response, answer) == score


@pytest.mark.parametrize("value", [1, True, 0.5, -3.0])
def test_a_score(value: object) -> None:
    assert to_score(value) == value


@pytest.mark.parametrize("value", [None, "1", b"1", [], float("nan"), float("inf"), 1e300, 10**400, {}, 1j])
def test_no_score(value: object) -> None:
    with pytest.raises(ValueError, match=r"expected a (finite )?number, got"):
        to_score(value)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (" 5 ", 5.0, 1),
        ("5.0", 5, 1),
        ("1e1", 10, 1),
        ("five", 5, 0),
        ("6", 5.0, 0),
        ("nan", 5, 0),
        ("9007199254740993", 9007199254740993, 1),
        ("9007199254740992", 9007199254740993, 0),
        ("5", "5.0", 0),
        ("True", True, 1),
        ("false", False, 1),
        ("1", True, 0),
        ("Paris", ["Paris"], 1),
        ("5", [5.0], 1),
        ("[1, 2]", [1, 2], 1),
        ('["a","b"]', ["a", "b"], 1),
        ("[2, 1]", [1, 2], 0),
        ('{"a": 1}', {"a": 1}, 1),
    ],
)
def test_exact_with_answers_of_other_types(response: str, answer: object, score: float) -> None:
    assert exact.score(response, answer) == score


@pytest.mark.parametrize(
    ("function", "answer", "reason"),
    [
        (exact, ["a", "b"], "has several parts"),
        (exact, float("nan"), "no reference answer"),
        (exact, b"a", "of the type bytes"),
        (gsm8k, True, "of the type bool"),
        (gsm8k, [3, 5], "of the type list"),
        (gsm8k, {"a": 5}, "of the type dict"),
        (maths, [1, 2], "of the type list"),
        (maths, False, "of the type bool"),
        (maths, [None], "no reference answer"),
    ],
)
def test_answers_whose_meaning_is_not_clear_are_failures(function: Any, answer: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        function.score("a 5", answer)


@pytest.mark.parametrize(
    "answer", ["50", r"50\%", "50%", r"$50\%$", r"\boxed{50\%}", "0.5", r"\frac{1}{2}", ["50"], 50.0]
)
def test_math_with_percentages(answer: object) -> None:
    assert maths.score(r"So it is \boxed{50\%}.", answer) == 1
    assert maths.score(r"So it is \boxed{40\%}.", answer) == 0
    assert maths.score(r"So it is \boxed{50}.", answer) == (0 if answer in ("0.5", r"\frac{1}{2}") else 1)
    assert maths.score(r"So it is \boxed{0.5}.", answer) == (0 if answer in ("50", ["50"], 50.0) else 1)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("A rise of 20%, so the answer is 42", "0.42", 0),
        ("A rise of 20%, so the answer is 42", "42", 1),
        (r"$\boxed{5}$, which is 50% of 10", "0.05", 0),
        (r"10\% of 50 is \boxed{5}", "0.05", 0),
        (r"\boxed{5 \text{ (10\% of 50)}}", "0.05", 0),
        ("50% of 100 is 50", "0.5", 0),
        ("I am 100% sure: 7", "0.07", 0),
        (r"the half, $\frac{1}{2}$ (50%)", "0.005", 0),
        (r"$\boxed{50}\%$", "0.5", 1),
        (r"$\boxed{50} \%$", "0.5", 1),
        (r"\boxed{\frac{1}{2}\%}", "0.005", 1),
        ("the result is 1,250.5%", "12.505", 1),
        (r"\boxed{.5\%}", "0.005", 1),
        (r"so $0.5\%$", "0.005", 1),
        (r"\boxed{7\%}", "0.07", 1),
        (r"\boxed{0.29}", "29%", 1),
        (r"$x = 12.5\%$", "0.125", 1),
        ("**50 %**", "0.5", 1),
        (r"\boxed{50\,\%}", "0.5", 1),
        (r"\boxed{50~\%}", "0.5", 1),
        (r"\boxed{50\ \%}", "0.5", 1),
        (r"\boxed{50{\%}}", "0.5", 1),
        (r"\boxed{50\text{ \%}}", "0.5", 1),
        (r"\boxed{0.5}", r"50\,\%", 1),
        (r"\boxed{0.5}", r"50\text{ \%}", 1),
        ("The answer is -5%.", "-0.05", 1),
        (r"so $50\%$", r"\frac{1}{2}", 1),
        (r"\boxed{0.42}", "Of 20%, the rest is $42$", 0),
        (r"\boxed{0.42}", r"20\% of them: \boxed{42}", 0),
        (r"\boxed{0.42}", r"\boxed{42}\%", 1),
    ],
)
def test_only_the_percent_sign_of_the_answer_counts(response: str, answer: str, score: float) -> None:
    assert maths.score(response, answer) == score


@pytest.mark.parametrize("answer", ["$5", r"\$5", "5"])
def test_math_with_money(answer: str) -> None:
    assert maths.score(r"\boxed{\$5}", answer) == maths.score(r"\boxed{5}", answer) == 1
