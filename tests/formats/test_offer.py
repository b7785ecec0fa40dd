"""What a run tells to lenders, and what it records of them."""

from pathlib import Path

from hpc_rl.formats.offer import (
    LENT,
    LENT_ENVIRONMENTS,
    LentEnvironments,
    LentNode,
    Offer,
    by_job,
    is_lent,
    read_lent_environments,
    read_lent_nodes,
    read_offer,
    versions_of,
    write_lent_environments,
    write_lent_nodes,
)


def test_an_offer_arrives_or_is_left_out(tmp_path: Path) -> None:
    assert read_offer(tmp_path) is None
    offer = Offer("10.0.0.1:6379", "/models/qwen", versions_of("pytest"), True, "1f")
    offer.write(tmp_path)
    assert read_offer(tmp_path) == offer and {"python", "hpc-rl", "ray", "pytest"} <= offer.versions.keys()
    (tmp_path / "offer.json").write_text('{"gcs_address": 3, "model": "m", "versions": {}}')
    assert read_offer(tmp_path) is None


def test_each_difference_of_versions_is_named() -> None:
    offer = Offer("a:1", "m", {"python": "3.11", "ray": "2.60.0", "vllm": "0.32"})
    assert offer.other_versions({"python": "3.11", "ray": "2.59.0", "other": "1"}) == [
        "ray: 2.59.0 here, 2.60.0 in the run",
        "vllm: missing here, 0.32 in the run",
    ]


def test_nodes_for_environments_are_recorded_beside_the_others(tmp_path: Path) -> None:
    lenders = [LentEnvironments("12", "cpu1", 4, 100), LentEnvironments("13_2", "cpu2")]
    write_lent_environments(tmp_path, lenders)
    assert read_lent_environments(tmp_path) == lenders and read_lent_nodes(tmp_path) == []
    assert is_lent({LENT: 1.0, "memory": 2.0}) and is_lent({LENT_ENVIRONMENTS: 1.0}) and not is_lent({"CPU": 1.0})


def test_damaged_lenders_are_left_out(tmp_path: Path) -> None:
    lenders = [LentNode("12", "gpu1", 4, 100, 0.5, 4, 10.0), LentNode("13_2", "gpu2", left=20.5)]
    write_lent_nodes(tmp_path, lenders)
    assert read_lent_nodes(tmp_path) == lenders
    (tmp_path / "lenders.json").write_text('{"lenders": [{"job": "12", "node": "a", "engines": -1}, 4]}')
    assert read_lent_nodes(tmp_path) == []
    (tmp_path / "lenders.json").write_text("[1]")
    assert read_lent_nodes(tmp_path) == []


def test_the_nodes_of_a_job_are_one_entry_and_the_smallest_jobs_too() -> None:
    found = [
        LentNode("1", "a", 0, 300, 0.03, places=4, joined=50.0, left=60.0),
        LentNode("2", "b", 4, 5000, 0.5, places=4, joined=10.0),
        LentNode("2", "c", 0, 1000, 0.1, places=4, joined=20.0, left=30.0),
        LentNode("2", "c", 1, 0, 0.0, places=4, joined=40.0),  # it came again
        LentNode("3", "a", 0, 200, 0.02, places=2, joined=5.0, left=70.0),
    ]
    assert list(map(str, by_job(found, 9))) == [
        "2 nodes (job 2): 5 engines, 6,000 tokens, 60%",
        "a (job 1): no engine now, 300 tokens, 3%",
        "a (job 3): no engine now, 200 tokens, 2%",
    ]
    first, rest = by_job(found, 1)
    assert (first.places, first.joined, first.left) == (8, 10.0, None)
    assert (str(rest), rest.places) == ("2 other jobs: no engine now, 500 tokens, 5%", 6)
    assert (rest.joined, rest.left) == (5.0, 70.0) and by_job([], 1) == []
