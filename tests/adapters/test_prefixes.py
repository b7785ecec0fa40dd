import pytest

from hpc_rl.adapters.prefixes import plain
from hpc_rl.adapters.program import Program


@pytest.mark.parametrize(
    ("typed", "ran"),
    [
        ("uv run -m skyrl.train.main_sft a=1", "python -m skyrl.train.main_sft a=1"),
        ("uv run --isolated --extra fsdp -m a.b", "python -m a.b"),
        ("uv run --frozen --python=3.12 --module a.b --x", "python -m a.b --x"),
        ("uv run --with x run.py --config c.yaml", "python run.py --config c.yaml"),
        ("uv run python -u run.py", "python -u run.py"),
        ("uv run rl @ rl.toml", "rl @ rl.toml"),
        ("uv run", ""),
        ("ray job submit --address=http://127.0.0.1:8265 -- python3 -m a.b --c 1", "python3 -m a.b --c 1"),
        ("ray job submit --no-wait -- uv run -m a.b", "python -m a.b"),
        ("python -m a.b", "python -m a.b"),
        ("ray job submit python run.py", "ray job submit python run.py"),
    ],
)
def test_what_the_jobs_python_runs(typed: str, ran: str) -> None:
    program = Program(tuple(typed.split()))
    assert plain(program).words == plain(plain(program)).words == tuple(ran.split())
