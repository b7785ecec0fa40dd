from __future__ import annotations

import pytest

from hpc_rl.host.proxies import ENV_PROXIES, proxies, set_aside

GIVEN = {"http_proxy": "http://a:1", "HTTP_PROXY": "http://b:1", "HTTPS_PROXY": "http://c:1", "all_proxy": ""}


def test_lower_case_wins() -> None:
    assert proxies(GIVEN) == {"http": "http://a:1", "https": "http://c:1"}
    assert proxies({"no_proxy": "localhost"}) == {}


def test_what_is_set_aside_is_found_again() -> None:
    aside = set_aside({**GIVEN, "ftp_proxy": "http://d:1", "no_proxy": "localhost", "PATH": "/bin"})
    assert aside.keys() == {"no_proxy", "PATH", ENV_PROXIES}
    assert proxies(aside) == {"http": "http://a:1", "https": "http://c:1", "ftp": "http://d:1"}
    assert set_aside(aside) == aside, "a process of Ray may start another one"


@pytest.mark.parametrize("environ", [{}, {"no_proxy": "*"}, {"http_proxy": ""}])
def test_without_proxies_nothing_is_added(environ: dict[str, str]) -> None:
    assert proxies(environ) == {} and ENV_PROXIES not in set_aside(environ)
