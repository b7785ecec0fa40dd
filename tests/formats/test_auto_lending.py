"""What a look of a run after its lender jobs leaves for the next one."""

import json
from pathlib import Path

from hpc_rl.formats.auto_lending import AutoLending, needs_looks, order_file, read_auto_lending, write_auto_lending


def test_a_look_is_read_again_and_the_order_has_the_newest_limit(tmp_path: Path) -> None:
    assert read_auto_lending(tmp_path) == AutoLending()
    found = AutoLending(0, 1, 2, "none", ["/runs/a"], 7, 2, 1, 12)
    write_auto_lending(tmp_path, found)
    assert read_auto_lending(tmp_path) == found
    order_file(tmp_path).write_text('{"most": 5}')
    assert read_auto_lending(tmp_path).most == 5
    order_file(tmp_path).unlink()
    assert read_auto_lending(tmp_path).most == 0


def test_looks_are_due_while_there_is_an_order_or_jobs_wait(tmp_path: Path) -> None:
    assert not needs_looks(tmp_path)
    write_auto_lending(tmp_path, AutoLending(waiting=1))
    assert needs_looks(tmp_path)
    write_auto_lending(tmp_path, AutoLending(running=1))
    assert not needs_looks(tmp_path)
    order_file(tmp_path).touch()
    assert needs_looks(tmp_path)


def test_damaged_values_are_left_out(tmp_path: Path) -> None:
    write_auto_lending(tmp_path, AutoLending(3, 1, 2))
    (state,) = tmp_path.iterdir()
    state.write_text(json.dumps({"most": -1, "waiting": "2", "running": 4, "lenders": [1], "unknown": 1}))
    assert read_auto_lending(tmp_path) == AutoLending(running=4)
