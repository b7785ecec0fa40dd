"""Text of others on a terminal."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.liveness.shown_text import escaped_output, shown, terminal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\ttext\nof ü 漢 👩‍🔬", "plain\ttext\nof ü 漢 👩‍🔬"),
        ("\x1b[1;31mred\x1b[0m \x1b[38:5:1mx", "red x"),
        ("\x1b]52;c;eA==\x07", r"\x1b]52;c;eA==\x07"),
        ("\x1b[2J\x1b[31", r"\x1b[2J\x1b[31"),
        ("\0" * 8 + "a" + "\0" * 9, r"\x00" * 8 + r"a\x00 (9 times)"),
        ("\x9b2J\x7f\x00", r"\x9b2J\x7f\x00"),
        ("a\u202eb\u2066c\u2028d", r"a\u202eb\u2066c\u2028d"),
        ("10%\r 50%\r100%\r\nnext\r\n", "100%\nnext\n"),
    ],
)
def test_control_characters_are_shown(text: str, expected: str) -> None:
    assert shown(text) == expected


@given(st.text())
def test_no_terminal_obeys_any_text(text: str) -> None:
    assert not set(shown(text)) & {*map(chr, range(9)), *map(chr, range(11, 32)), *map(chr, range(127, 160)), "\u202e"}


def test_what_is_printed_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with escaped_output():
        print("\x1b]0;title\x07")
        print("\x9b2J", file=sys.stderr)
        print("\x1b[2J", file=terminal(sys.stdout), flush=True)
    print("\x07")
    assert capsys.readouterr() == ("\\x1b]0;title\\x07\n\x1b[2J\n\x07\n", "\\x9b2J\n")
