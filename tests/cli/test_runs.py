"""Commands that show a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpc_rl.cli.app import app
from tests.tracking.test_evaluations import EVALUATION


def test_the_status_of_an_evaluation_has_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "scores"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}\n")
    (folder / "job.json").write_text(json.dumps({"kind": "eval"}))
    plain = CliRunner().invoke(app, ["status", "scores"])
    (folder / "eval.json").write_text(json.dumps(EVALUATION))
    found = CliRunner().invoke(app, ["status", "scores"])
    assert (plain.exit_code, found.exit_code) == (0, 0)
    assert found.output.startswith(plain.output)
    table = found.output[len(plain.output) :]
    assert all(data["name"] in table for data in EVALUATION["data"])
    in_json = CliRunner().invoke(app, ["status", "--json", "scores"])
    assert json.loads(in_json.output)["run"] == "scores"
