from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.submission.preflight.checks import check_bash
from hpc_rl.submission.script.setup_lines import statements


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a && b", "", "c"], ["a && b", "c"]),
        (["a && b; c;d"], ["a && b", "c", "d"]),
        (["a\nb; c\n"], ["a", "b", "c"]),
        (["if a; then", "  b; c", "fi; d"], ["if a; then\n  b; c\nfi; d"]),
        (["if a; then b; fi; c"], ["if a; then b; fi", "c"]),
        (["for x in 1 2; do a; b; done"], ["for x in 1 2; do a; b; done"]),
        (["case x in a) b;; *) c; d;; esac; e"], ["case x in a) b;; *) c; d;; esac", "e"]),
        (["echo 'a; b' \"c; d\" e\\; f; g"], ["echo 'a; b' \"c; d\" e\\; f", "g"]),
        (["echo 'a", "b; c'; d"], ["echo 'a\nb; c'; d"]),
        (["a \\", "  b", "c"], ["a \\\n  b", "c"]),
        (["echo a\\\\", "b"], ["echo a\\\\", "b"]),
        (["cat <<E; a", "b; c", "E", "d"], ["cat <<E; a\nb; c\nE", "d"]),
        (["a # b; c", "# d; e"], ["a # b; c", "# d; e"]),
        (["a ||", "b"], ["a ||\nb"]),
        (["f() {", "a; b", "}", "f; g"], ["f() {\na; b\n}", "f", "g"]),
        (["$(a; b); (c; d); e"], ["$(a; b)", "(c; d)", "e"]),
    ],
)
def test_statements_are_complete_and_as_short_as_possible(lines: list[str], expected: list[str]) -> None:
    assert statements(tuple(lines)) == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo 'a", "unexpected EOF"),
        ("cat <<E", "here-document"),
        ("export A=1 \\", "ends with a backslash"),
        ("exec bash -l", "replaces the job script"),
        ("true; exec -a name $SHELL", "replaces the job script"),
        ("cd /x && exec ./run", "replaces the job script"),
    ],
)
def test_lines_that_would_swallow_the_job_script_are_refused(line: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^slurm\.setup: .*{said}"):
        check_bash("slurm.setup", ("true", line))


def test_redirections_of_the_script_and_calls_named_exec_are_accepted() -> None:
    check_bash("slurm.setup", ("exec > log 2>&1", "exec 3< file; exec {fd}> x", "srun exec.sh", "find / -exec ls"))


def test_what_bash_says_about_the_shell_of_the_user_is_no_error_of_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "init").write_text("echo 'not closed\n")
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")  # that of a machine from which the user came with ssh
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "init"))
    check_bash("slurm.setup", ("true",))
    assert statements(("echo locale; echo 2",)) == ["echo locale", "echo 2"]
