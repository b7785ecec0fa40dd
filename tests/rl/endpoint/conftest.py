from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environments.templates import CHATML
from tests.helpers import make_tokenizer
from tests.rl.endpoint.policy import Loop, looping


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    made = make_tokenizer(320)
    made.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>"])
    made.chat_template = CHATML.replace("{% if tools %}", "{% if tools %}<tool_call>")
    return made


@pytest.fixture
def loop(tokenizer: Any, tmp_path: Path) -> Iterator[Loop]:
    with looping(tokenizer, tmp_path) as found:
        yield found
