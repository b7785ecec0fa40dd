"""Download models and data sets into the Hugging Face cache: python -m hpc_rl.data.fetch NAME...

Run this on a machine with internet access. It is a process of its own, because huggingface_hub and datasets read the
cache's location (HF_HOME) when they are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.data.reading.hub import load_splits
from hpc_rl.errors import EXIT_BAD_INPUT, UserError
from hpc_rl.formats.hub import hub_address
from hpc_rl.software.installation import install_command

_OTHER_FORMATS = ["*.onnx*", "*.gguf", "*.h5", "*.msgpack", "*.ot", "*.pth", "*.pt", "original/*", "onnx/*"]
_OTHER_WEIGHTS = ["*.bin", *_OTHER_FORMATS]
"""Copies of the weights for other programs, which would double the download."""


def main(names: Sequence[str]) -> int:
    """Fetch the names one after another and return the exit code."""
    for name in names:
        try:
            print(fetch(name), flush=True)
        except UserError as error:
            print(f"hpc-rl: {error}", file=sys.stderr)
            return error.exit_code
        except ModuleNotFoundError as error:
            print(
                f"hpc-rl: {sys.executable} has no {error.name}: {install_command('train', sys.executable)}",
                file=sys.stderr,
            )
            return EXIT_BAD_INPUT
    return 0


def fetch(name: str) -> str:
    """Download the model of this name from the hub or, if there is none, the data set; describe what was fetched.

    Args:
        name: a name on the hub; `name:configuration` always names a data set.

    Raises:
        UserError: the name does not exist, access is denied, or the hub or the cache cannot be reached.
    """
    folder = None if ":" in name else fetch_model(name)
    return _dataset_line(name) if folder is None else _model_line(name, folder)


def fetch_model(name: str) -> Path | None:
    """Return the snapshot folder of a model, downloading what is missing; None if the hub has no model of this name.

    Raises:
        UserError: access is denied, or the hub or the cache cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, ignore_patterns=_OTHER_WEIGHTS))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, ignore_patterns=_OTHER_FORMATS))
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its terms on its page, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError:
        return None
    except (OSError, HFValidationError) as error:
        unreachable = "; set https_proxy, or copy the cache from a machine with internet"
        remedy = unreachable if isinstance(error, LocalEntryNotFoundError) else ""
        raise UserError(f"cannot fetch {name} from {hub_address()}: {_first_line(error)}{remedy}") from error
    return folder


def _model_line(name: str, folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} is not a model that transformers can load: it has no config.json")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"model {name}: {_amount(size)} in {folder}"


def _dataset_line(name: str) -> str:
    from datasets.exceptions import DatasetNotFoundError

    try:
        splits = load_splits(name)
    except UserError as error:
        if isinstance(error.__cause__, DatasetNotFoundError):
            raise UserError(
                f"{hub_address()} has no {'' if ':' in name else 'model and no '}data set {name} that you may read: "
                "check the name, or run `hf auth login`"
            ) from error
        raise UserError(f"cannot fetch {name} from {hub_address()}: {_first_line(error.__cause__ or error)}") from error
    rows = ", ".join(f"{split} {len(data):,}" for split, data in splits.items())
    folder = next((Path(file["filename"]).parent for data in splits.values() for file in data.cache_files), "memory")
    return f"data set {name}: {rows} rows in {folder}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _amount(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
