from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.software.secrets import find_secret, hidden, known_secrets, names_secret, refuse_secrets

TOKEN = "hf_abcdefghijklmnop1234"


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No secret but that of the test."""
    for name in known_secrets().values():
        monkeypatch.delenv(name.removeprefix("$"), raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "hf_token", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "AWS_SESSION_TOKEN", "SLURM_JWT"),
        *("WANDB_API_KEY", "OPENAI_KEY", "OPENAI_API_KEY_2", "AWS_SECRET_ACCESS_KEY", "APIKEY", "myAccessKey"),
        *("MY_PASSWD", "PASSWORD", "DB_PASSWORD1", "SSH_PASSPHRASE", "CLIENT_SECRET", "SECRET_VALUE", "GH_PAT"),
        *("GOOGLE_CREDENTIALS", "MYSQL_PWD", "ROOT_PASS", "TOKEN_OF_MINE"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "EOS_TOKEN", "WANDB_MODE", "PWD", "OLDPWD", "PATH"),
        *("SSH_AUTH_SOCK", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "SECRET_FILE", "KEYBOARD", "AWS_ACCESS_KEY_ID"),
        *("MONKEY", "COMPASS", "PASSES", "HF_HOME", "PAD_TOKEN", "SSL_CERT_FILE"),
    ],
)
def test_other_names(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    ("name", "value", "is_known"),
    [
        ("HF_TOKEN", TOKEN, True),
        ("MY_PASSWD", "hunter2", True),
        ("MY_PASSWD", "short", False),
        ("MY_PASSWD", "Secret", False),
        ("MY_PASSWD", "/home/me/password", False),
        ("OPENAI_KEY", TOKEN, True),
        ("SORT_KEY", "question", False),
        ("SORT_KEY", "question_and_answer", False),
        ("PASSES", TOKEN, False),
    ],
)
def test_values_that_are_looked_for(monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_known: bool) -> None:
    monkeypatch.setenv(name, value)
    assert known_secrets() == ({value: f"${name}"} if is_known else {})


def test_files_with_secrets(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123456789abcdef0123\n")
    files = {TOKEN: str(tmp_path / "hub" / "token"), "0123456789abcdef0123": str(tmp_path / "netrc")}
    assert known_secrets() == files
    (tmp_path / "netrc").write_text("machine\n")  # not valid
    (tmp_path / "hub" / "token").write_bytes(b"\xff")
    assert known_secrets() == {}


@pytest.mark.parametrize(
    ("value", "text", "is_there"),
    [
        (TOKEN, f"a: x{TOKEN}y", True),
        (TOKEN, TOKEN.upper(), False),
        ("hunter2", "password: hunter2\n", True),
        ("hunter2", "hunter21", False),
        ("hunter2", "my_hunter2", False),
        ("p@ss/word", "http://me:p%40ss%2Fword@proxy", True),
        ("a<b&c>d", "<td>a&lt;b&amp;c&gt;d</td>", True),
        ("a.b.c.d", "aXbXcXd", False),
    ],
)
def test_where_a_value_occurs(monkeypatch: pytest.MonkeyPatch, value: str, text: str, is_there: bool) -> None:
    assert find_secret(text, {value: "$IT"}) == ("$IT" if is_there else None)
    monkeypatch.setenv("MY_PASSWORD", value)
    assert (hidden(text) != text) is is_there and (not is_there or "[$MY_PASSWORD]" in hidden(text))


def test_the_message_names_the_place_and_not_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refuse_secrets({"a": "nothing"})
    with pytest.raises(UserError, match=r"^reward\.kwargs\.key contains the value of \$HF_TOKEN, which ") as error:
        refuse_secrets({"a": "nothing", "reward.kwargs.key": f"Bearer {TOKEN}"})
    assert TOKEN not in str(error.value)
