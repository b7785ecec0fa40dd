"""Location of the shipped folders (configs, slurm_templates): next to the package in a checkout, or else inside it."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped(folder: str) -> Path:
    """Return the path of a top-level folder that ships with the package."""
    checkout = _PACKAGE.parent / folder
    return checkout if (_PACKAGE.parent / "setup.cfg").is_file() else _PACKAGE / "shipped" / folder
