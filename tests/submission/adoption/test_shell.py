"""Words and statements, compared with those of bash."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.submission.adoption.shell import Scope, options, shown, statements

VARIABLES = {"A": "x y", "B": "1", "E": "", "HOME": "/h"}
TEXTS = [
    "a  b\tc # d",
    "a#b 'c # d' \"e\" # f",
    '$A "$A" x$B ${B}2 $E "$E" "$A"$B',
    "'$A' \\$A \"\\$A \\x\" a\\ b",
    '${B:-2} ${E:-3} ${N:-"p q"} ${N:-p q} "${N:-p q}"',
    '$((B + 2 * 3)) $(( (B + 1) * (2 - 4) )) "$((B))" $((7 / 2 % 2))',
    "~/x --p=~/y p=~/z '~' \"~\"",
    "a > f b 2>&1 c &> g 2> h < i d >> j",
    'a "" \'\' "it\'s" \'say "x"\'',
    "a \\\n  b\\\nc",
    "\"a\nb\" 'c\nd'",
    "[a,b] {x=1} a=b,c --x='[\"y\"]'",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_bash(text: str) -> None:
    command = f"f() {{ printf '%s\\0' \"$@\" 1>&3; }}; f {text}"
    read, write = os.pipe()
    script = f'cd "$(mktemp -d)"; : > i; exec 3>&{write}; {command}'
    environ = {**VARIABLES, "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], env=environ, pass_fds=[write], check=True, timeout=60, capture_output=True)
    os.close(write)
    with os.fdopen(read) as pipe:
        expected = pipe.read().split("\0")[:-1]
    words = Scope({name: value for name, value in VARIABLES.items() if name != "HOME"}).words(text)
    assert [word.replace("\ue000HOME\ue001", "/h") for word in words] == expected


def test_variables_are_followed_as_far_as_they_are_known() -> None:
    scope = Scope({"SLURM_NNODES": "4"})
    for text in (
        "A=(-x 'a b')",
        "A+=(--y=$SLURM_NNODES)",
        'B="run ${A[@]}"',
        "B+=' z'",
        "T=$(date)",
        "D=$T/x",
        "P=${A[0]}",
    ):
        for word in scope.words(text):
            scope.assign(word)
    words = scope.words('"${A[@]}" $B $D "${A[0]}" `id` ${S%.py} $Z "$@" $1 ${2:-x}')
    assert [shown(word) for word in words] == [
        *("-x", "'a b'", "--y=4", "run", "-x", "a", "b", "--y=4", "z", '"${T:?}"/x'),
        *('"${VALUE2:?}"', '"${VALUE3:?}"', '"${VALUE4:?}"', '"${Z:?}"', '"$@"', '"$1"', '"${2:-x}"'),
    ]
    assert scope.sources["T"] == "$(date)" and scope.sources["VALUE4"] == "${S%.py}"


@given(st.text(st.characters(exclude_characters="\0\ue000\ue001", exclude_categories=["Cs"]), min_size=1))
def test_a_shown_word_is_read_as_it_is(word: str) -> None:
    assert shlex.split(shown(word)) == [word]
    assert Scope({}).words(shown(word)) == [word]


def test_statements_have_the_numbers_of_their_lines() -> None:
    script = "#!/bin/bash\n\na=1 # x\nif b; then\n  c\nfi\nd \\\n  e\ncat <<E\nf <g>\nE\nbad <x>\nh\n"
    assert list(statements(script)) == [
        *((3, "a=1 # x"), (4, "if b; then\n  c\nfi"), (7, "d \\\n  e")),
        *((9, "cat <<E\nf <g>\nE"), (12, "bad <x>"), (13, "h")),
    ]


def test_options_and_their_values() -> None:
    words = shlex.split("--a_b=1 --c 2 --flag -N3 -x=4 y -H -l")
    assert list(options(words, {"N": "nodes"})) == [
        *(("a-b", "1"), ("c", "2"), ("flag", None), ("nodes", "3"), ("x", "4"), ("", "y"), ("H", None), ("l", None)),
    ]
    assert list(options(["a", "-n", "4", "--nv", "-lu"])) == [("", "a"), ("n", "4"), ("nv", None), ("lu", None)]
