import pytest

from hpc_rl.errors import UserError
from hpc_rl.submission.series.grid import grid


def never(_words: object) -> int:
    raise AssertionError("the cluster was asked")


def test_every_combination_the_last_key_fastest() -> None:
    common, points = grid(["optim.lr=1e-6,3e-6", "model.path=m", "seed=1,2,3"], never)
    assert common == ["model.path=m"]
    assert [point.values for point in points] == [
        {"optim.lr": lr, "seed": seed} for lr in ("1e-6", "3e-6") for seed in ("1", "2", "3")
    ]
    assert points[1].overrides == ["optim.lr=1e-6", "seed=2"]


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
    assert [point.values["key"] for point in grid([f"key={text}"], never)[1]] == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr=1e-6,,3e-6"], "lr=1e-6,,3e-6: a value is empty"),
        (["lr=1e-6,"], "a value is empty"),
        (["lr=,1"], "a value is empty"),
        (["lr=1,2,1"], "1 is listed 2 times"),
        (["betas=[0.9,0.95],[0.9"], "] is missing"),
        (["betas=0.9],1"], "] has no opening bracket"),
        (["path='a,b"], "' is missing"),
        (["lr=1e-6", "seed=1"], "nothing to sweep"),
        (["betas=[0.9,0.95]"], "nothing to sweep"),
        ([], "nothing to sweep"),
        (["lr=1,2", "+lr=3"], "lr is given 2 times"),
    ],
)
def test_a_malformed_list_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        grid(words, never)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_sweep_that_is_too_large_is_refused_before_its_points_are_made() -> None:
    words = [f"{key}={','.join(map(str, range(100)))}" for key in "abcdefgh"]
    with pytest.raises(
        UserError, match=r"has 10000 points \(a: 100 x b: 100\), but .* at most 9999 .*\(MaxArraySize\)"
    ):
        grid(words[:2], lambda _: 9999)
    with pytest.raises(UserError, match="has 10000000000000000 points"):
        grid(words, lambda _: 10**9)
    assert len(grid(words[:2], lambda _: 10_000)[1]) == 10_000


def test_the_cluster_is_asked_only_about_a_sweep_above_slurms_default() -> None:
    values = ",".join(map(str, range(1000)))
    assert len(grid([f"a={values}"], never)[1]) == 1000
    with pytest.raises(AssertionError, match="asked"):
        grid([f"a={values},1000"], never)


def test_the_limit_is_that_of_a_point_with_all_words() -> None:
    asked: list[object] = []

    def most(words: object) -> int:
        asked.append(words)
        return 3000

    values = ",".join(map(str, range(1001)))
    grid([f"a={values}", "slurm.sbatch.clusters=foo", "b=[1,2],[3]"], most)
    assert asked == [["slurm.sbatch.clusters=foo", "a=0", "b=[1,2]"]]
