import pytest

from hpc_rl.formats.counted import counted


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "node", "0 nodes"),
        (1, "node", "1 node"),
        (2, "node", "2 nodes"),
        (1024, "GPU", "1,024 GPUs"),
        (1, "CPU process", "1 CPU process"),
        (3, "CPU process", "3 CPU processes"),
    ],
)
def test_a_number_of_things_has_the_right_plural(count: int, noun: str, words: str) -> None:
    assert counted(count, noun) == words
