"""Scores 1 if the response's final number equals the answer's, else 0.

The final number is the one after ####, as in GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems"), or otherwise the last number.
"""

from __future__ import annotations

import re
from decimal import Decimal

from hpc_rl.rewards.number import required_text

_MARK = "####"
# A minus after a digit, letter or bracket is a subtraction.
_NUMBER = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z)\]])[-−])?(?:\$(?P<inner_minus>-)?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def score(response: str, answer: object) -> float:
    """Compare the final numbers; the answer may be a number or a whole solution."""
    expected = final_number(required_text(answer))
    if expected is None:
        raise ValueError(f"the reference answer {str(answer)[:40]!r} has no number")
    return float(final_number(response) == expected)


def extract(response: str) -> str | None:
    """Return the answer: the final number, so that 1,000 and 1000.0 are the same."""
    found = final_number(response)
    return None if found is None else str(found.normalize())


def final_number(text: str) -> Decimal | None:
    """Return the first number after the last ####, or else the last number of the text, or else None.

    Commas between thousands, $, % and a full stop after the number do not change its value.
    """
    _, mark, after = text.rpartition(_MARK)
    found = _NUMBER.search(after) if mark else None
    if found is None:
        *_, found = [None, *_NUMBER.finditer(text)]
    if found is None:
        return None
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["minus"] or found["inner_minus"] else value
