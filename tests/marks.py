"""Marks of single cases of a parametrized test."""

from typing import Any

import pytest


def long(*values: Any) -> Any:
    """A case that only `make test-long` runs: it varies what the other cases cover."""
    return pytest.param(*values, marks=pytest.mark.long)
