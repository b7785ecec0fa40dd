import gc
import subprocess
import sys

import pytest

from hpc_rl.software.imports import large_imports


def test_nothing_is_collected_during_imports_and_their_objects_are_left_out_later() -> None:
    kept, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), large_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == kept and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_who_collects_by_hand_continues_to() -> None:
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


FIRST_LIBRARY = """
import gc, importlib, sys

class Finder:
    def find_spec(name, path, target=None):
        if name in ("ray", "tensordict", "torch", "transformers"):
            print(name, "with" if gc.isenabled() else "without")
            sys.exit()

sys.meta_path.insert(0, Finder)
importlib.import_module(sys.argv[1])
"""
"""Ends at the import of the first large library, and prints whether it would be with garbage collection."""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("hpc_rl.rl.workers.worker", "tensordict without"),
        ("hpc_rl.rl.rollout.engine_process", "torch without"),
    ],
)
def test_processes_that_ray_starts_import_their_libraries_without_collections(module: str, expected: str) -> None:
    arguments = [sys.executable, "-c", FIRST_LIBRARY, module]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.strip() == expected
