"""A repository from an archive whose configuration names programs: none of them runs at a submission."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.users import VICTIM, as_ordinary, run

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user needs root"),
]
MAKE = """
git init --quiet repo && cd repo
git config user.name a && git config user.email a@example.org
printf 'one\\n' > file.txt && printf '* diff=own filter=own\\n' > .gitattributes
git add . && git commit --quiet -m first
tree=$(git rev-parse 'HEAD^{tree}')
signed=$(printf 'tree %s\\nauthor a <a@b> 1 +0000\\ncommitter a <a@b> 1 +0000\\ngpgsig -----BEGIN \
PGP SIGNATURE-----\\n \\n x\\n -----END PGP SIGNATURE-----\\n\\nsigned\\n' $tree | git hash-object -t commit -w --stdin)
git reset --quiet --hard $signed
printf 'two\\n' > file.txt
printf '#!/bin/sh\\ntouch %s/ran\\ncat "$@" 2> /dev/null\\n' "$HOME" > "$HOME/evil" && chmod +x "$HOME/evil"
"""
SNAPSHOT = (
    "from pathlib import Path\nfrom hpc_rl.submission.queue import git_snapshot\nprint(git_snapshot(Path('repo')))"
)
EVIL = "$HOME/evil"
SETTINGS = {
    "fsmonitor": f'git config core.fsmonitor "{EVIL}"',
    "external diff": f'git config diff.external "{EVIL}"',
    "diff driver": f'git config diff.own.command "{EVIL}"',
    "textconv": f'git config diff.own.textconv "{EVIL}"',
    "clean filter": f'git config filter.own.clean "{EVIL}"',
    "process filter": f'git config filter.own.process "{EVIL}"; git config filter.own.required true',
    "filter with an odd name": f"printf '* filter=a=b\\n' > .gitattributes; git config filter.a=b.clean \"{EVIL}\"",
    "included filter": f'git config --file ../more filter.own.clean "{EVIL}"; git config include.path "$HOME/more"',
    "filter of a work tree": "git config extensions.worktreeConfig true; "
    f'git config --worktree filter.own.clean "{EVIL}"',
    "hook": f'cp "{EVIL}" .git/hooks/post-index-change; touch -d 2020-01-01 .gitattributes',
    "hooks elsewhere": f'mkdir ../h; cp "{EVIL}" ../h/post-index-change; git config core.hooksPath ../h; '
    "touch -d 2020-01-01 .gitattributes",
    "signature": f'git config log.showSignature true; git config gpg.program "{EVIL}"',
    "pager": f'git config core.pager "{EVIL}"; git config pager.log "{EVIL}"; git config pager.diff "{EVIL}"',
    "missing objects": "git config extensions.partialClone origin; git config remote.origin.promisor true; "
    f'git config remote.origin.url .; git config remote.origin.uploadpack "{EVIL}"; '
    "rm .git/objects/$(git rev-parse HEAD:file.txt | sed 's|^..|&/|')",
    "submodule": "git -c protocol.file.allow=always submodule --quiet add ./. sub; "
    f'git -C sub config core.fsmonitor "{EVIL}"; git config diff.submodule diff',
}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hpc-rl-git-", dir="/var/tmp") as name:
        os.chown(name, VICTIM, VICTIM)
        shell(Path(name), MAKE)
        yield Path(name)


def shell(home: Path, text: str, **environ: str) -> str:
    done = run(VICTIM, as_ordinary(VICTIM, "bash", "-euc", text), home, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def snapshot(home: Path, **environ: str) -> str:
    done = run(VICTIM, as_ordinary(VICTIM, sys.executable, "-P", "-c", SNAPSHOT), home, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SETTINGS)
def test_no_program_of_a_repository_runs(home: Path, name: str) -> None:
    shell(home, f"cd repo; {SETTINGS[name]}; rm -f ../ran")
    found = snapshot(home)
    assert not (home / "ran").exists()
    assert found.startswith("commit ") and "branch " in found
    if name != "missing objects":
        assert " M file.txt" in found and "\n-one\n+two\n" in found


def test_the_settings_of_the_user_change_no_patch(home: Path) -> None:
    """Difftastic as the user's viewer, colours, and other prefixes."""
    lines = ["diff.external difft", "color.ui always", "diff.noprefix true", "diff.relative true", "diff.submodule log"]
    shell(home, "printf '#!/bin/sh\\necho side by side\\n' > difft; chmod +x difft")
    shell(home, "\n".join(f"git config --global {line}" for line in lines))
    environ = {"GIT_EXTERNAL_DIFF": str(home / "difft"), "GIT_DIR": "/nowhere", "GIT_PAGER": str(home / "difft")}
    patch = snapshot(home, **environ).partition(" M file.txt\n")[2]
    assert patch.startswith("diff --git a/file.txt b/file.txt\n") and "\x1b" not in patch
    (home / "patch").write_text(patch.rstrip("\n") + "\n")
    assert shell(home, "cd repo; git checkout --quiet file.txt; git apply ../patch; cat file.txt") == "two\n"


def test_filters_of_the_user_stay(home: Path) -> None:
    """Git LFS compares what its filter makes of a file; it may be installed in the repository, too."""
    shell(home, "git config --global filter.own.clean 'tr a-z A-Z'; cd repo; git config filter.own.clean 'tr a-z x'")
    assert "\n+TWO\n" in snapshot(home)


def test_outside_of_a_repository(tmp_path: Path) -> None:
    code = SNAPSHOT.replace("'repo'", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is not in a git repository" in done.stdout
