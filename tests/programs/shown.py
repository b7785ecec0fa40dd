"""What the tests have shown of other people's programs (shown.json), and the tables of docs/other-programs.md from it.

`python -m tests.programs.shown` writes the tables into the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_rl.adapters.table import ADAPTERS
from hpc_rl.system.files import write_atomically
from tests.programs.environments import output_of
from tests.programs.programs import TRIED, Tried

FILE = Path(__file__).parent / "shown.json"
PAGE = Path(__file__).parents[2] / "docs" / "other-programs.md"
BEGIN, END = "<!-- tables: python -m tests.programs.shown -->\n", "<!-- end of the tables -->\n"
CHAIN = ("preemption", "lost node", "stop", "walltime", "equal losses")
COLUMNS = (*CHAIN, "all lost without it", "--local", "--in-allocation")

_STEP, _ANY, _SAME = (
    "at its next step",
    "any number of GPUs; with DeepSpeed, the same number",
    "the same number of GPUs",
)
_SOURCE = "never run, as it needs GPUs; written from its source"
DOES: Mapping[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("transformers", "axolotl", "llamafactory", "ms-swift", "lightning"), (_STEP, _ANY, "its callbacks")
    ),
    "trl": (f"{_STEP}; GRPO after its generation cycle if the time allows", _ANY, "its callbacks"),
    "accelerate": (
        "ends after its next `save_state`",
        "any number of GPUs, if the script has `--resume_from_checkpoint`",
        "`Accelerator.log`",
    ),
    "torchtitan": (_STEP, _SAME, "its metrics"),
    **dict.fromkeys(("verl", "verl-sft", "openrlhf"), (_STEP, _SAME, "its log")),
    "openrlhf-trainers": (_STEP, _SAME, "none"),
    "nemo-rl": (_STEP, "any number of GPUs", "its log"),
    "skyrl": (f"{_STEP}; its asynchronous trainer at its own times", _SAME, "its log"),
    "prime-rl": ("ends after its next checkpoint", "any number of GPUs", "its log"),
    "generic": ("if it looks for the stop file", "whatever it supports", "none"),
}
"""Adapter -> when it saves, on what it resumes, and where its progress comes from."""
OTHERWISE: Mapping[str, str] = {
    "torchtitan": "0.3, never run, as it needs CUDA; the hooks were compared with its package",
    "verl": "0.9.1, never run on GPUs; its training loop ran with stand-ins for its workers",
    "openrlhf": f"0.11.2 and before, {_SOURCE}",
    "openrlhf-trainers": f"0.11.2 and before, {_SOURCE}",
    "nemo-rl": "0.6, never run, as it needs GPUs; only its timer ran, with a value that hpc-rl passes",
    "skyrl": f"0.3, {_SOURCE}",
    "prime-rl": f"0.8, {_SOURCE}",
    "generic": "without an adapter, run the tests of `submit torchrun` and `submit ray` in `make test`",
}
"""Adapter that is in no row of TRIED -> its version, and what is known of it."""


class Record:
    """Writes down what a test has shown of a program."""

    def __init__(self, program: str, tried: Tried) -> None:
        self._program = program
        code = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
        self._versions = output_of(tried.environment, code, *tried.packages).strip()

    def forgets(self) -> None:
        """Remove what the test is about to show again."""
        self._write(set(read().get(self._program, {}).get("shown", [])) - set(CHAIN))

    def shows(self, column: str) -> None:
        """Add one of COLUMNS."""
        self._write({*read().get(self._program, {}).get("shown", []), column})

    def _write(self, shown: Iterable[str]) -> None:
        row = {"versions": self._versions, "shown": sorted(shown, key=COLUMNS.index)}
        found = {**read(), self._program: row}
        rows = [f' "{name}": {json.dumps(found[name])}' for name in TRIED if name in found]
        write_atomically(FILE, "{\n" + ",\n".join(rows) + "\n}\n")


def read() -> dict[str, dict[str, Any]]:
    """Return what was shown: program -> versions, and columns."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def _table(rows: Iterable[Iterable[str]]) -> list[str]:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + " --- |" * head.count(" | ") + " --- |", *rest]


def rendered() -> str:
    """Return the tables: what each adapter does, what was shown of it, and what was never run."""
    does = [["program", "adapter", "job", "saves", "resumes on", "progress from"]]
    for name, row in ADAPTERS.items():
        does.append([row.title, f"`{name}`", " or ".join(f"`{kind}`" for kind in row.kinds), *DOES[name]])
    shown = [["program", "tried with", *(f"`{name}`" if name.startswith("-") else name for name in COLUMNS)]]
    for name, found in read().items():
        cells = ("yes" if column in found["shown"] else "" for column in COLUMNS)
        shown.append([TRIED[name].title, str(found["versions"]), *cells])
    others = [f"- `{name}`: {text}" for name, text in OTHERWISE.items()]
    between = "Shown on two nodes of a real Slurm with CPUs, by `make test-programs`:"
    return "\n".join([*_table(does), "", between, "", *_table(shown), "", "Not tried on Slurm:", "", *others, ""])


def write_page() -> None:
    """Replace what is between the markers of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    write_atomically(PAGE, before + BEGIN + rendered() + END + rest.partition(END)[2])


if __name__ == "__main__":
    write_page()
