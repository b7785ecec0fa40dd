"""Small models and data made on the spot, for tests, the demo and benchmarks; and recorded answers of Slurm."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.probes.tiny_model import CHAT_TEMPLATE, chats, make_tiny_model, make_tokenizer, write_chats

__all__ = ["CHAT_TEMPLATE", "chats", "make_tiny_model", "make_tokenizer", "recorded", "write_chats"]


def recorded(cluster: str, command: str) -> str:
    """What a real Slurm has answered (tests/slurm/recorded), without the lines that say to what."""
    lines = (Path(__file__).parent / "slurm" / "recorded" / cluster / f"{command}.txt").read_text().splitlines(True)
    return "".join(line for line in lines if not line.startswith("#"))
