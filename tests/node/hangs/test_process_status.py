import math
from dataclasses import replace

import pytest

from hpc_rl.liveness.heartbeat import Heartbeat
from hpc_rl.node.hangs.process_status import (
    LONG,
    ProcessMonitor,
    ProcessStatus,
    culprits,
    described,
    not_known,
    quiet_s,
    waiting_driver,
)

TIMEOUT_S = 100.0


def beat(
    pid: int = 1, phase: str = "optimizer", count: int = 1, is_first: bool = False, waits: bool = False
) -> Heartbeat:
    return Heartbeat(pid, f"rank {pid}", phase, 7, is_first, waits, count)


def process(name: str = "rank 0", silent_s: float = 101, state: str = "S", phase: str = "optimizer", step: int = 7,
          waits: bool = False, in_collective: bool | None = None, limit_s: float = TIMEOUT_S,
          on_gpu: bool = False) -> ProcessStatus:  # fmt: skip
    return ProcessStatus(name, "n1", 1, silent_s, limit_s, state, phase, step, waits, in_collective, on_gpu)


@pytest.mark.parametrize(
    ("last", "limit_s"),
    [
        (beat(), TIMEOUT_S),
        (beat(is_first=True), LONG * TIMEOUT_S),
        (beat(phase="load"), LONG * TIMEOUT_S),
        (beat(phase="save_checkpoint"), LONG * TIMEOUT_S),
        (beat(phase="export"), LONG * TIMEOUT_S),
        (beat(phase="generate"), LONG * TIMEOUT_S),
        (beat(phase="start"), math.inf),
    ],
)
def test_how_long_a_process_may_be_silent(last: Heartbeat, limit_s: float) -> None:
    assert ProcessMonitor("n1", TIMEOUT_S).limit_s(last) == limit_s


def test_silence_is_the_time_without_a_new_beat() -> None:
    monitor = ProcessMonitor("n1", TIMEOUT_S)
    running = {1: "S", 2: "R"}

    def silent(*beats: Heartbeat) -> list[float]:
        return [seen.silent_s for seen in monitor.look({one.pid: one for one in beats}, running, {}, 5.0)]

    assert silent(beat(1), beat(2)) == [0, 0]
    assert silent(beat(1), beat(2)) == [5, 5]
    assert silent(beat(1), beat(2, count=2)) == [10, 0]
    assert silent(beat(1)) == [15, 5]  # a file that cannot be read now
    assert silent(beat(1, count=2)) == [0, 10]
    del running[2]
    assert silent(beat(1, count=3), beat(2, count=3)) == [0]  # an ended process is no process


def test_a_process_is_a_suspect_after_its_limit_and_not_at_it() -> None:
    monitor = ProcessMonitor("n1", TIMEOUT_S)
    monitor.look({1: beat()}, {1: "S"}, {}, 1)
    (seen,) = monitor.look({1: beat()}, {1: "S"}, {}, TIMEOUT_S)
    assert not seen.is_suspect
    (seen,) = monitor.look({1: beat()}, {1: "S"}, {}, 1)
    assert seen == ProcessStatus("rank 1", "n1", 1, 101, TIMEOUT_S, "S", "optimizer", 7)
    assert seen.is_suspect


def test_long_pauses_that_ended_raise_the_limit_of_their_phase() -> None:
    monitor = ProcessMonitor("n1", TIMEOUT_S)
    for elapsed, count in ((0, 1), (50, 2), (12, 3)):
        monitor.look({1: beat(count=count)}, {1: "S"}, {}, elapsed)
    assert monitor.limit_s(beat()) == 500
    assert monitor.limit_s(beat(phase="data")) == TIMEOUT_S


@pytest.mark.parametrize("kind", [{"is_first": True}, {"waits": True}])
def test_pauses_of_another_kind_raise_no_limit(kind: dict[str, bool]) -> None:
    monitor = ProcessMonitor("n1", TIMEOUT_S)
    monitor.look({1: beat(**kind)}, {1: "S"}, {}, 1)
    monitor.look({1: beat(count=2)}, {1: "S"}, {}, 50)
    assert monitor.limit_s(beat()) == TIMEOUT_S


def test_a_stopped_process_is_a_suspect_in_every_phase_also_without_beats() -> None:
    monitor = ProcessMonitor("n1", TIMEOUT_S)
    beats, states, names = {1: beat(phase="start", waits=True)}, {1: "T", 5: "T", 6: "S"}, {5: "raylet", 6: "other"}
    first = monitor.look(beats, states, names, 60)
    assert [(seen.name, seen.silent_s, seen.is_suspect) for seen in first] == [
        ("rank 1", 0, False),
        ("raylet", 0, False),
    ]
    second = monitor.look(beats, states, names, 101)
    assert [(seen.name, seen.silent_s, seen.is_suspect) for seen in second] == [
        ("rank 1", 101, True),
        ("raylet", 101, True),
    ]
    monitor.look(beats, {1: "T", 5: "S"}, names, 1)
    third = monitor.look(beats, {1: "T", 5: "T"}, names, 1)
    assert [seen.silent_s for seen in third] == [103, 0]  # 5 went on in between


STOPPED = process("stopped", state="T", silent_s=101, in_collective=None)
ALONE = process("alone", silent_s=101, in_collective=False)
WAITS_LONGER = process("waits longer", silent_s=140, in_collective=True)
WAITS = process("waits", silent_s=120, in_collective=True)
IN_TIME = process("in time", silent_s=99)
PATIENT = process("with a longer limit", silent_s=101, in_collective=False, limit_s=200)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([IN_TIME], None),
        ([], None),
        ([IN_TIME, WAITS], WAITS),
        ([WAITS, WAITS_LONGER], WAITS_LONGER),
        ([WAITS_LONGER, ALONE], ALONE),
        ([ALONE, STOPPED, WAITS_LONGER], STOPPED),
        ([PATIENT], None),
        ([WAITS, PATIENT], PATIENT),
        ([WAITS, replace(PATIENT, silent_s=100)], WAITS),
        ([WAITS, replace(PATIENT, step=6)], WAITS),
        ([WAITS, replace(PATIENT, in_collective=None)], WAITS),
        ([WAITS, replace(PATIENT, waits=True)], WAITS),
        ([replace(WAITS, in_collective=None), PATIENT], replace(WAITS, in_collective=None)),
        ([process(waits=True)], None),
        ([process("raylet", state="T", phase="", silent_s=200), STOPPED], STOPPED),
    ],
)
def test_the_culprit(processes: list[ProcessStatus], expected: ProcessStatus | None) -> None:
    assert culprits(processes) == ([] if expected is None else [expected])


def test_who_is_silent_before_any_limit() -> None:
    driver, stopped = process("driver", silent_s=500, waits=True), replace(STOPPED, silent_s=1)
    assert culprits([IN_TIME, process("shorter", silent_s=3), driver], before_limit=True) == [IN_TIME]
    assert culprits([IN_TIME, stopped], before_limit=True) == [stopped]
    assert culprits([process(waits=True)], before_limit=True) == []


def test_the_flight_records_decide_before_the_stacks() -> None:
    """The stacks of a rank that writes a checkpoint contain torch.distributed, and it has been silent for longer."""
    first, second = replace(WAITS_LONGER, name="rank 0"), replace(ALONE, name="rank 1")
    assert culprits([first, second]) == [second]
    late = replace(IN_TIME, name="rank 2", in_collective=False)
    assert culprits([first, second, late], {"rank 2"}) == [late]
    assert culprits([first, second, STOPPED], {"rank 1"}) == [STOPPED]
    assert culprits([first, second], {"rank 0"}) == [second]  # which waits itself
    assert culprits([first, replace(late, waits=True)], {"rank 2"}) == [first]  # which nobody has called
    assert culprits([IN_TIME], {"in time"}) == []


GPU_0, GPU_1, GPU_2 = (
    process(f"rank {rank}", silent_s, in_collective=False, on_gpu=True) for rank, silent_s in enumerate((112, 105, 111))
)


OF_POOL = [replace(seen, name=f"{seen.name} of pool a") for seen in (GPU_0, GPU_1)]
ENGINES = [replace(GPU_0, name="rollout engine 0 of pool a"), replace(GPU_1, name="rollout engine 1 of pool a")]
SLOW, MUTE, FROZEN = replace(GPU_1, silent_s=9, step=6), replace(GPU_1, in_collective=None), replace(GPU_1, state="T")


@pytest.mark.parametrize(
    ("processes", "late", "expected"),
    [
        ([GPU_0, GPU_1, GPU_2], {"rank 1"}, [GPU_1]),
        ([GPU_1, GPU_0, GPU_2], set(), [GPU_0, GPU_1, GPU_2]),
        ([GPU_0, SLOW], set(), [GPU_0, SLOW]),
        ([GPU_0, MUTE, GPU_2], set(), [MUTE]),
        ([replace(GPU_0, in_collective=True), GPU_1, replace(GPU_2, in_collective=True)], set(), [GPU_1]),
        ([GPU_0, FROZEN, GPU_2], set(), [FROZEN]),
        ([GPU_0, replace(GPU_1, waits=True)], set(), [GPU_0]),
        ([GPU_0, replace(GPU_1, on_gpu=False)], set(), [replace(GPU_1, on_gpu=False)]),
        ([GPU_0, *OF_POOL], set(), [GPU_0]),
        (OF_POOL, set(), OF_POOL),
        (ENGINES, set(), ENGINES[:1]),
        ([GPU_0, replace(GPU_1, name="the driver")], set(), [GPU_0]),
    ],
)
def test_on_gpus_the_stacks_leave_open_which_rank_waits(
    processes: list[ProcessStatus], late: set[str], expected: list[ProcessStatus]
) -> None:
    assert culprits(processes, late) == expected


def test_a_job_on_gpus_is_seen_as_one() -> None:
    monitor = ProcessMonitor("n1", TIMEOUT_S, on_gpu=True)
    assert [seen.on_gpu for seen in monitor.look({1: beat()}, {1: "S"}, {}, 1)] == [True]


def test_what_is_not_known_is_said() -> None:
    assert not_known([GPU_0, replace(GPU_1, phase="data")]) == (
        "rank 0 on node n1, rank 1 on node n1: no heartbeat for 105 to 112 s in data of step 7, optimizer of step 7;"
        " it is not known which of them keeps the others waiting: the stacks of processes that wait for a GPU do not "
        "show it, and neither do the flight records"
    )
    many = not_known([replace(GPU_0, name=f"rank {rank}", step=0) for rank in range(7)])
    assert "rank 3 on node n1, 3 more: no heartbeat for 112 to 112 s in optimizer; it is" in many


def test_a_job_is_quiet_if_all_wait() -> None:
    assert quiet_s([process(waits=True, silent_s=4), process(waits=True, silent_s=3)]) == 3
    assert quiet_s([process(waits=True), process(silent_s=3)]) is None
    assert quiet_s([process(phase="", state="T")]) == math.inf
    driver = process("the driver", phase="gen", waits=True)
    assert waiting_driver([process(phase="run", waits=True), driver, process(phase="x")]) == driver
    assert waiting_driver([process()]) is None


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (process(), "rank 0 on node n1: no heartbeat for 101 s in optimizer of step 7"),
        (process(step=0), "rank 0 on node n1: no heartbeat for 101 s in optimizer of step 9"),
        (process(phase="run"), "rank 0 on node n1: no heartbeat for 101 s in step 7"),
        (
            process(state="T"),
            "rank 0 on node n1 is stopped (SIGSTOP): no heartbeat for 101 s in optimizer of step 7",
        ),
        (
            process(state="D", step=3),
            "rank 0 on node n1 is blocked in the kernel, usually by a file system: no heartbeat for 101 s in "
            "optimizer of step 3",
        ),
    ],
)
def test_descriptions(seen: ProcessStatus, text: str) -> None:
    assert described(seen, [process(step=9)]) == text
    assert described(process("gcs_server", phase="", step=0, state="T"), []) == (
        "gcs_server on node n1 is stopped (SIGSTOP): no heartbeat for 101 s"
    )
