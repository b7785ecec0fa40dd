from pathlib import Path

import pytest

from hpc_rl.node.pulses import Pulse, Pulses, read_pulse
from hpc_rl.node.silence import Sight

NODES = ("a", "b", "c")
SEEN = Sight("rank 1", "b", 12, 30.5, 20, "T", "optimizer", 7, in_collective=False)


def test_what_a_node_publishes_others_read(tmp_path: Path) -> None:
    assert read_pulse(tmp_path, 1) is None
    own = Pulses(tmp_path, NODES, 1)
    own.publish(Pulse(quiet_s=3.5))
    assert read_pulse(tmp_path, 1) == Pulse(count=1, quiet_s=3.5)
    own.publish(Pulse(finds_hang=True, finding="it is late", sights=(SEEN,)))
    assert read_pulse(tmp_path, 1) == Pulse(count=2, finds_hang=True, finding="it is late", sights=(SEEN,))
    (tmp_path / ".node1.pulse").write_text('{"sights": [{}]}')
    assert read_pulse(tmp_path, 1) is None


def test_node_0_watches_all_and_the_others_watch_node_0(tmp_path: Path) -> None:
    assert list(Pulses(tmp_path, NODES, 0).watched) == [1, 2]
    assert list(Pulses(tmp_path, NODES, 2).watched) == [0]


def test_a_node_without_new_pulses_is_lost(tmp_path: Path) -> None:
    head, b, c = (Pulses(tmp_path, NODES, rank) for rank in range(3))
    b.publish(Pulse())
    assert list(head.look(head.watched, 500)) == [1]  # c has not begun
    c.publish(Pulse())
    head.look(head.watched, 60)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {}
    b.publish(Pulse())
    head.look(head.watched, 1)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {}
    head.look(head.watched, 60)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {2: 61}
    assert head.lost(hang_timeout_s=60, exchange_s=11) == {}
    c.publish(Pulse(has_ended=True))
    head.look(head.watched, 61)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {1: 121}


@pytest.mark.parametrize(
    ("own", "b", "c", "expected"),
    [
        (9.0, Pulse(quiet_s=5.0), Pulse(quiet_s=7.0), 5.0),
        (1.0, Pulse(quiet_s=5.0), Pulse(quiet_s=7.0), 1.0),
        (None, Pulse(quiet_s=5.0), Pulse(quiet_s=7.0), None),
        (9.0, Pulse(quiet_s=5.0), Pulse(), None),
        (9.0, Pulse(quiet_s=5.0), Pulse(has_ended=True), 5.0),
    ],
)
def test_the_job_is_quiet_if_all_nodes_are(
    tmp_path: Path, own: float | None, b: Pulse, c: Pulse, expected: float | None
) -> None:
    head = Pulses(tmp_path, NODES, 0)
    for rank, pulse in ((1, b), (2, c)):
        Pulses(tmp_path, NODES, rank).publish(pulse)
    head.look(head.watched, 1)
    assert head.quiet_s(own) == expected
    head.look(head.watched, 30)
    assert head.quiet_s(100.0) == (None if expected is None and own is not None else 35.0)
