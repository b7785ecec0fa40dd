from hpc_rl.adapters.adapter import ReportedStep
from hpc_rl.adapters.step_line import read_step_line, step_line


def test_a_line_is_read_again() -> None:
    line = step_line(3, 9, {"timing/step": 1.5, "reward": 1, "text": "x", "list": [1]})
    assert line == 'hpc-rl: step 3 of 9: {"timing/step": 1.5, "reward": 1.0}'
    found = {"timing_s/step": 1.5, "critic/score/mean": 1.0}
    groups = {"timing/": "timing_s/"}
    assert read_step_line(f"(task pid=1) {line}", {"reward": "critic/score/mean"}, groups) == ReportedStep(3, 9, found)
    assert read_step_line(step_line(4, None, {"a": float("nan")}), {}, {}).step == 4  # type: ignore[union-attr]
    assert read_step_line("hpc-rl: step 3 of 9: {half", {}, {}) is None
    assert read_step_line("hpc-rl: step 3: {'a'}", {}, {}) is None
