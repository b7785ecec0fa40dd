"""Which of several ends is the cause, as tables."""

import pytest

from hpc_rl.node.causes import End, Kind, first_cause, kind_of, outcome_of

OK, SAVED = End(0, 0), End(0, 75)
OWN, OTHER = End(1, 137, text="killed"), End(2, 3, text="failed")
DRIVER = End(0, 1, Kind.DEPENDENT, "driver")
CUT = End(0, 1, Kind.CONNECTION, "connection closed")
ASKED = End(2, 143, Kind.TERMINATED)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([], None),
        ([OK, SAVED], None),
        ([CUT, ASKED, OWN], OWN),
        ([OWN, OTHER], OWN),
        ([OTHER, OWN], OTHER),
        ([DRIVER, OWN], OWN),
        ([DRIVER, CUT], DRIVER),
        ([ASKED, CUT], CUT),
        ([OK, ASKED], ASKED),
    ],
)
def test_the_kind_decides_and_then_the_order(ends: list[End], cause: End | None) -> None:
    assert first_cause(ends) == cause


@pytest.mark.parametrize(
    ("ends", "exit_code", "cause"),
    [
        ([OK, OK], 0, None),
        ([OK, SAVED], 75, None),
        ([SAVED, ASKED], 75, None),  # it has saved too, and was only slower to end
        ([ASKED, SAVED], 75, None),
        ([SAVED, CUT], 75, None),
        ([SAVED, DRIVER], 1, DRIVER),
        ([SAVED, OWN], 137, OWN),
        ([ASKED, OWN, CUT], 137, OWN),
        ([ASKED, OK], 143, ASKED),
    ],
)
def test_the_outcome(ends: list[End], exit_code: int, cause: End | None) -> None:
    found = outcome_of(ends)
    assert (found.exit_code, found.cause) == (exit_code, cause)


@pytest.mark.parametrize(
    ("exit_code", "was_asked", "last_lines", "kind"),
    [
        (137, False, "", Kind.OWN),
        (1, False, "ValueError: no luck", Kind.OWN),
        (1, False, "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:1", Kind.CONNECTION),
        (1, False, "Read error [10.77.0.2]:5: Connection reset by peer", Kind.CONNECTION),
        (1, False, "DistBackendError: NCCL error: remote process exited or there was", Kind.CONNECTION),
        (137, False, "Connection closed by peer", Kind.OWN),
        (3, False, "Connection closed by peer", Kind.OWN),
        (143, False, "", Kind.OWN),
        (137, True, "", Kind.TERMINATED),
        (1, True, "Connection closed by peer", Kind.TERMINATED),
    ],
)  # fmt: skip
def test_the_kind_of_the_end_of_a_rank(exit_code: int, was_asked: bool, last_lines: str, kind: Kind) -> None:
    assert kind_of(exit_code, was_asked, last_lines) is kind


def test_an_end_is_one_line() -> None:
    end = End(3, 137, Kind.CONNECTION, "two\nlines", "rank 7")
    assert "\n" not in end.to_line() and End.from_line(end.to_line()) == end
