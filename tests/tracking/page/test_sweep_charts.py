from __future__ import annotations

import pytest

from hpc_rl.tracking.history import History
from hpc_rl.tracking.page.report import render_page
from hpc_rl.tracking.page.sweep_charts import best_first, sweep_plots, swept_keys
from hpc_rl.tracking.recorded import RecordedRun
from hpc_rl.tracking.summary import first_mean, last_mean, result_of, run_summary


def run(name: str, swept: dict[str, str], *losses: float, key: str = "val/loss") -> RecordedRun:
    records = [{"step": i, "total_steps": 9, "time": 0.0, key: loss} for i, loss in enumerate(losses, 1)]
    return RecordedRun(name, records, [], History(()), [], "", swept=swept)


GRID = [
    run(f"s_{lr}_{batch}", {"optim.lr": lr, "batch": batch}, 9.0, float(lr) + float(batch))
    for batch in ("8", "16")
    for lr in ("10", "2")
]


def test_one_group_per_key_with_values_in_order() -> None:
    rate, batch = sweep_plots(GRID)
    assert (rate.title, batch.title) == ("optim.lr", "batch")
    (figure,) = rate.figures
    assert (figure.title, figure.unit, figure.plot.categories) == ("Validation loss", "against optim.lr", ["2", "10"])
    assert [(line.name, line.points) for line in figure.plot.series] == [
        ("batch=8", [(0, 10.0), (1, 18.0)]),
        ("batch=16", [(0, 18.0), (1, 26.0)]),
    ]
    assert swept_keys(GRID) == ["optim.lr", "batch"]


def test_a_result_is_the_mean_of_the_last_tenth() -> None:
    points = [(float(i), float(i)) for i in range(30)]
    assert (first_mean(points), last_mean(points)) == (1.0, 28.0)
    assert (first_mean(points[:19]), last_mean(points[:19])) == (0.0, 18.0)
    assert last_mean([]) is None


@pytest.mark.parametrize("key", ["eval/score", "generate/score"])
def test_a_metric_of_all_responses_so_far_has_its_last_value_as_result(key: str) -> None:
    scored = run("s", {"a": "1"}, *[0.0] * 18, 0.6, 0.7, key=key)
    assert result_of(scored, key) == 0.7 and run_summary(scored).results["Score"] == "0.7000"
    better = run("t", {"a": "2"}, 0.8, key=key)
    assert best_first([scored, better]) == [better, scored]


def test_the_best_run_is_first_and_one_without_a_result_last() -> None:
    failed = run("failed", {"optim.lr": "1", "batch": "8"})
    assert [each.name for each in best_first([failed, *GRID])] == ["s_2_8", "s_10_8", "s_2_16", "s_10_16", "failed"]
    rewarded = [run(str(score), {"a": "1"}, score, key="val/score") for score in (0.5, 2.0, 1.0)]
    assert [each.name for each in best_first(rewarded)] == ["2.0", "1.0", "0.5"]
    assert best_first([failed]) == [failed]


def test_many_combinations_are_summed_up() -> None:
    runs = [run(f"s_{i}", {"a": str(i % 2), "b": str(i)}, float(i)) for i in range(18)]
    plot = sweep_plots(runs)[0].figures[0].plot
    assert [line.name for line in plot.series] == ["highest run", "mean of runs", "lowest run"]
    assert [line.points for line in plot.series] == [[(0, 16), (1, 17)], [(0, 8), (1, 9)], [(0, 0), (1, 1)]]


def test_text_values_follow_numbers() -> None:
    runs = [run(value, {"a": value}, 1.0) for value in ("b", "10", "a", "9")]
    assert sweep_plots(runs)[0].figures[0].plot.categories == ["9", "10", "a", "b"]


def test_stages_of_a_pipeline_are_in_order_and_against_the_round() -> None:
    stages = [
        run(f"p_{number}-{name}", {"round": str(number), "stage": name}, loss)
        for number, losses in ((1, (5.0, 1.0)), (2, (2.0, 3.0)))
        for name, loss in zip(("a", "b"), losses, strict=True)
    ]
    (group,) = sweep_plots(stages)
    (figure,) = group.figures
    assert (group.title, figure.plot.categories) == ("round", ["1", "2"])
    assert [(line.name, line.points) for line in figure.plot.series] == [
        ("stage=a", [(0, 5.0), (1, 2.0)]),
        ("stage=b", [(0, 1.0), (1, 3.0)]),
    ]
    page = render_page(stages)
    assert "<h1>pipeline p</h1>" in page and "The best run is first" not in page
    assert page.index("p_1-a</th>") < page.index("p_1-b</th>") < page.index("p_2-a</th>")
    page = render_page([*stages, run("best", {"lr": "1"}, 0.5)])
    assert page.index("p_1-a</th>") < page.index("p_1-b</th>") < page.index("p_2-a</th>") < page.index("best</th>")


def test_the_page_of_a_sweep() -> None:
    page = render_page(
        [run(f"lr_{i}", {"optim.lr": lr}, 3.0, loss) for i, (lr, loss) in enumerate((("1", 2.0), ("2", 1.0)))]
    )
    assert "<h1>sweep lr</h1>" in page and "Results against <code>optim.lr</code>" in page
    assert page.index("lr_1</th>") < page.index("lr_0</th>") and "The best run is first." in page
