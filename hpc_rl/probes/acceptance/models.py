"""The models of the acceptance run and their data, on the node's own disk.

    python -m hpc_rl.probes.acceptance.models FOLDER small 64

A process of its own creates them, because transformers writes no model in a rank other than 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpc_rl.errors import RunError
from hpc_rl.probes.tiny_model import chats, make_tiny_model, write_chats
from hpc_rl.system.ownership import private_folder

SMALL, LARGE = "small", "large"
"""Folders of the two models. The numbers are compared on the small one; the speed is measured on the large one."""
_SHAPES: dict[str, dict[str, Any]] = {
    SMALL: {"vocab": 512, "hidden": 256, "layers": 2, "num_attention_heads": 4},
    # Of Qwen3-0.6B.
    LARGE: {
        **{"vocab": 151_936, "hidden": 1024, "layers": 28, "tie": True, "head_dim": 128, "dtype": "bfloat16"},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072},
    },
}
LONG_CHARACTERS = 2500
"""About the length of the answers with which the speed is measured on GPUs."""
CREATE_TIMEOUT_S = 400


def create(folder: Path, size: str, rows: int) -> None:
    """Create a model and its data in another process.

    Args:
        rows: conversations of the data.

    Raises:
        RunError: it failed.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder), size, str(rows)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CREATE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"creating the {size} model took longer than {CREATE_TIMEOUT_S} s") from error
    if done.returncode != 0:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1]
        raise RunError(f"the {size} model could not be created in {folder}: {last}")


def write_long_chats(path: Path, rows: int) -> None:
    """Write conversations with answers of about LONG_CHARACTERS characters."""
    answers = [chat[1]["content"] for chat in chats(100)]
    with path.open("w", encoding="utf-8") as file:
        for number, chat in enumerate(chats(rows)):
            text = ""
            while len(text) < LONG_CHARACTERS:
                text += answers[(number + len(text)) % len(answers)]
            file.write(json.dumps({"messages": [chat[0], {"role": "assistant", "content": text}]}) + "\n")


def main(folder: Path, size: str, rows: int) -> None:
    """Create a model and its data, unless they exist."""
    if not private_folder(folder):
        raise SystemExit(
            f"{folder} belongs to somebody else, or others can open it: set TMPDIR to a folder of your own"
        )
    data = folder / f"{size}.jsonl"
    if data.exists():
        return
    make_tiny_model(folder / size, kind="qwen3", **_SHAPES[size])
    partial = data.with_suffix(".partial")
    write_chats(partial, rows) if size == SMALL else write_long_chats(partial, rows)
    partial.replace(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
