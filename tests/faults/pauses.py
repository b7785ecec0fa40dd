"""Makes the processes of a run wait in a function, until it is asked to stop, may go on, or is ended."""

from __future__ import annotations

from tests.e2e.workspace import Workspace

_SITECUSTOMIZE = """
import importlib.util, os, pathlib, sys, time

DEADLINE_S = 900

def pause(owner, name):
    original = getattr(owner, name)
    run, mark = pathlib.Path(os.environ["HPC_RL_RUN_DIR"]), os.environ["PAUSE_IF"]
    ends = [run / name for name in os.environ["PAUSE_UNTIL"].split()]

    def paused(*arguments, **named):
        if not mark or (run / mark).exists():
            (run / "paused").touch()
            deadline = time.monotonic() + DEADLINE_S
            while not any(end.exists() for end in ends) and time.monotonic() < deadline:
                time.sleep(0.05)
        return original(*arguments, **named)

    setattr(owner, name, paused)

class Pausing:
    def find_spec(self, name, path, target=None):
        if name != module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_pause(loaded):
            load(loaded)
            *owners, last = function.split(".")
            pause(getattr(loaded, owners[0]) if owners else loaded, last)

        spec.loader.exec_module = load_and_pause
        return spec

if os.environ.get("PAUSE_ON") in ("", os.uname().nodename):
    module, function = os.environ["PAUSE_IN"].split(":")
    sys.meta_path.insert(0, Pausing())
"""
"""Python imports it at start-up. The function is replaced when its module is imported."""


def pause_in(workspace: Workspace, function: str, node: str = "", mark: str = "", until: str = "stop go") -> list[str]:
    """Return options with which a run waits in a function, and creates `paused` in its run directory.

    Args:
        function: MODULE:FUNCTION or MODULE:CLASS.METHOD.
        node: only processes on this node wait.
        mark: they wait only if there is such a file or folder in the run directory.
        until: files in the run directory, one of which ends the wait.
    """
    folder = workspace.folder / "pauses"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    variables = {"PYTHONPATH": str(folder), "PAUSE_IN": function, "PAUSE_ON": node, "PAUSE_IF": mark}
    variables["PAUSE_UNTIL"] = until
    return [f"slurm.env.{name}='{value}'" for name, value in variables.items()]
