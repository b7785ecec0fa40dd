"""docs/other-programs.md has what the adapters and the recorded tests give."""

from hpc_rl.adapters.table import ADAPTERS
from tests.programs.programs import TRIED
from tests.programs.shown import BEGIN, DOES, END, OTHERWISE, PAGE, read, rendered


def test_the_page_has_the_tables() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == rendered(), "python -m tests.programs.shown"


def test_each_adapter_is_tried_or_has_a_reason() -> None:
    tried = {row.adapter for row in TRIED.values()}
    assert set(DOES) == set(ADAPTERS) == tried | set(OTHERWISE) and not tried & set(OTHERWISE)
    assert set(read()) == set(TRIED)
