"""1 where the final number is right, as GSM8K writes it (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems"): the number after ####, or else the last one.
"""

from __future__ import annotations

import re
from decimal import Decimal

from hpc_rl.rewards.number import needed

_MARK = "####"
# A minus after a digit, letter or bracket is a subtraction.
_NUMBER = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z)\]])[-−])?(?:\$(?P<inner_minus>-)?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def score(response: str, answer: object) -> float:
    """The answer may be the number alone or a whole solution."""
    expected = final_number(needed(answer))
    if expected is None:
        raise ValueError(f"the reference answer {str(answer)[:40]!r} has no number")
    return float(final_number(response) == expected)


def final_number(text: str) -> Decimal | None:
    """The first number after the last ####, where there is one, else the last number of the text; None for none.

    Commas between thousands, $, % and a full stop after it are not part of its value.
    """
    _, mark, after = text.rpartition(_MARK)
    found = _NUMBER.search(after) if mark else None
    if found is None:
        *_, found = [None, *_NUMBER.finditer(text)]
    if found is None:
        return None
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["minus"] or found["inner_minus"] else value
