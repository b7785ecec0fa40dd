"""What the shell proposes for an argument after `hpc-rl --install-completion`."""

from __future__ import annotations

from pathlib import Path


def run_names(incomplete: str) -> list[str]:
    """Runs below ./runs; a path is left to the shell."""
    folder = Path("runs")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]
