"""Python imports this file at its start, because the launcher puts its folder first on PYTHONPATH. It prepares the
adapter of the program, and then runs the sitecustomize of the user or of the site, if there is one."""

import importlib.util
import sys
from pathlib import Path

_OWN = str(Path(__file__).absolute().parent)


def _prepare() -> None:
    try:
        from hpc_rl.adapters.inside.hooks import install
    except ImportError as error:
        print(
            f"hpc-rl: {sys.executable} cannot import hpc_rl ({error}), so this program is neither asked to save nor "
            "resumed: install hpc-rl in this environment",
            file=sys.stderr,
        )
    else:
        install()


def _run_next() -> None:
    sys.path[:] = [folder for folder in sys.path if folder != _OWN]
    own = sys.modules.pop(__name__)
    spec = importlib.util.find_spec(__name__)
    if spec is None or spec.loader is None:
        sys.modules[__name__] = own
        return
    sys.modules[__name__] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_prepare()
_run_next()
