"""Where the shipped folders (configs, slurm_templates) are: beside the package in a checkout, else inside it."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped(folder: str) -> Path:
    """Path of a top-level folder that ships with the package."""
    checkout = _PACKAGE.parent / folder
    return checkout if (_PACKAGE.parent / "setup.cfg").is_file() else _PACKAGE / "shipped" / folder
