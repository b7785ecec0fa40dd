"""`hpc-rl runs --verify`."""

import json
import subprocess
from pathlib import Path

from hpc_rl.training.checkpoints import checksums, folders
from hpc_rl.training.checkpoints.folders import MODEL, Progress
from tests.helpers import hpc_rl


def make_run(folder: Path, name: str, steps: int = 2) -> Path:
    run = folder / "runs" / name
    for step in range(1, steps + 1):
        part = folders.begin(run / "checkpoints", step) / MODEL
        part.mkdir()
        (part / "__0_0.distcp").write_bytes(bytes(100))
        checksums.write(part, {"__0_0.distcp": checksums.of_file(part / "__0_0.distcp")})
        folders.name(run / "checkpoints", Progress(samples=1, dtype="float32", step=step))
    (run / "config.yaml").touch()
    return run


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return hpc_rl("runs", "--verify", *arguments, folder=folder)


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "a"), make_run(tmp_path, "b", steps=1)
    done = verify(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["intact"] * 3

    (run / "checkpoints" / "step-00000002" / MODEL / "__0_0.distcp").write_bytes(bytes(99) + b"x")
    done = verify(tmp_path)
    assert done.returncode == 1
    assert "runs/a/checkpoints/step-00000002: model/__0_0.distcp does not match its checksum" in done.stdout
    assert "damaged: 1 of 3 checkpoints;" in done.stderr
    (line,) = [json.loads(line) for line in verify(tmp_path, "--json", "b").stdout.splitlines()]
    assert (line["state"], line["problem"]) == ("intact", "") and line["bytes"] > 100


def test_checkpoints_of_an_earlier_version_cannot_be_verified(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=1)
    for file in run.glob("checkpoints/**/checksums.json"):
        file.unlink()
    done = verify(tmp_path, "a")
    assert done.returncode == 0 and done.stdout.startswith("unknown") and "it has no checksums" in done.stdout


def test_nothing_to_verify(tmp_path: Path) -> None:
    assert "no checkpoints" in verify(tmp_path).stderr
    done = verify(tmp_path, "--reverse")
    assert done.returncode == 2 and "cannot be combined" in done.stderr
    assert verify(tmp_path, "nothing").returncode == 2
