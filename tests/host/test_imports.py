import gc

import pytest

from hpc_rl.host.imports import large_imports


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
