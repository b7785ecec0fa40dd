import pytest

from hpc_rl.errors import UserError
from hpc_rl.submission.grid import grid


def test_every_combination_the_last_key_fastest() -> None:
    points = grid(["optim.lr=1e-6,3e-6", "model.path=m", "seed=1,2,3"])
    assert [point.values for point in points] == [
        {"optim.lr": lr, "seed": seed} for lr in ("1e-6", "3e-6") for seed in ("1", "2", "3")
    ]
    assert points[1].overrides == ("optim.lr=1e-6", "model.path=m", "seed=2")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ("{a: [1,2], b: (3,4)},null", ["{a: [1,2], b: (3,4)}", "null"]),
        ("'a,b',\"c's, d\"", ["'a,b'", '"c\'s, d"']),
        ("'[',x", ["'['", "x"]),
        ("a.jsonl,b=c.jsonl", ["a.jsonl", "b=c.jsonl"]),
    ],
)
def test_commas_in_brackets_and_quotes_separate_nothing(text: str, values: list[str]) -> None:
    assert [point.values["key"] for point in grid([f"key={text}"])] == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr=1e-6,,3e-6"], "lr=1e-6,,3e-6: an empty value"),
        (["lr=1e-6,"], "an empty value"),
        (["lr=,1"], "an empty value"),
        (["lr=1,2,1"], "1 stands there 2 times"),
        (["betas=[0.9,0.95],[0.9"], "] is missing"),
        (["betas=0.9],1"], "] closes nothing"),
        (["path='a,b"], "' is missing"),
        (["lr=1e-6", "seed=1"], "nothing to sweep"),
        (["betas=[0.9,0.95]"], "nothing to sweep"),
        ([], "nothing to sweep"),
        (["lr=1,2", "+lr=3"], "lr is given 2 times"),
    ],
)
def test_a_malformed_list_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        grid(words)
    assert said in str(error.value) and "\n" not in str(error.value)
