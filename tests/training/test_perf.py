from __future__ import annotations

import threading
import time

import pytest

from hpc_rl.training.perf import GAP_S, Clock, Spans


def test_spans_become_one_with_those_that_they_overlap_or_follow() -> None:
    spans, now = Spans(), time.perf_counter()
    for start, end in ((-30, -28), (-20, -19), (-18, -17), (-19 + 0.5 * GAP_S, -16), (-16 + 2 * GAP_S, -15)):
        spans.add("gen", now + start, now + end)
    spans.add("reward", now - 21, now - 14)
    found = spans.take()
    late = time.perf_counter() - now
    assert [pytest.approx((a - late, b - late), abs=0.01 + late) for a, b in [(-30, -28), (-20, -16)]] == found["gen"][
        :2
    ]
    assert len(found["gen"]) == 3 and len(found["reward"]) == 1
    assert spans.take() == {}


def test_a_phase_that_fails_is_no_span() -> None:
    spans = Spans()
    with spans("adv"):
        pass
    with pytest.raises(ZeroDivisionError), spans("ref"):
        raise ZeroDivisionError
    ((start, end),) = spans.take().pop("adv")
    assert start <= end <= 0


def test_threads_record_at_the_same_time() -> None:
    spans, barrier = Spans(), threading.Barrier(8)

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(200):
            with spans(f"phase {index % 2}"):
                pass

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(spans.take()) == ["phase 0", "phase 1"]


def test_a_clock_has_seconds_and_spans() -> None:
    clock = Clock()
    with clock("step"), clock("gen"):
        time.sleep(0.01)
    assert sorted(clock.seconds) == ["timing_s/gen", "timing_s/step"] and clock.seconds["timing_s/gen"] >= 0.01
    ((start, end),) = clock.spans.take()["gen"]
    assert end - start == pytest.approx(clock.seconds["timing_s/gen"])
    assert clock.began + clock.seconds["timing_s/step"] <= time.perf_counter()


def test_spans_that_nobody_takes_are_forgotten() -> None:
    spans = Spans()
    for number in range(10_001):
        spans.add("gen", number, number + 0.5)
    (found,) = spans.take().values()
    assert len(found) == 10_000 and round(found[1][0] - found[0][0], 6) == 1 and found[-1][1] - found[0][0] == 9999.5


def test_a_phase_that_occurs_twice_has_the_sum() -> None:
    clock = Clock()
    for _ in range(2):
        with clock("carry"):
            time.sleep(0.01)
    assert clock.seconds["timing_s/carry"] >= 0.02
