"""The table of faults."""

from pathlib import Path

from tests.faults.outcomes import Outcome, read, table, write

FROZEN = Outcome(
    "SIGSTOP of a rank",
    "sft",
    31.4,
    "rank 1 (log in /runs/a) | silent in /var/tmp/hpc-rl-b_1/disk; its log is /runs/a/log",
    "resumed",
    2,
    "nothing",
    losses_equal=True,
)


def test_outcomes_are_a_table(tmp_path: Path) -> None:
    full = Outcome("disk full", "ppo", None, "No space left", "exit code 1", None, "a file", losses_equal=False)
    for outcome in (FROZEN, full, FROZEN):
        write(outcome, tmp_path)
    assert table(read(tmp_path)).splitlines() == [
        "| fault | job | detected after | first message | then | steps lost | left behind | losses equal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| disk full | ppo |  | No space left | exit code 1 |  | a file | NO |",
        "| SIGSTOP of a rank | sft | 31 s | rank 1 \\| silent in /disk | resumed | 2 | nothing | yes |",
    ]
