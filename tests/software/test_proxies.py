from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from hpc_rl.software.proxies import ENV_PROXIES, ENV_RAY_HOOK, proxies, set_aside, without_proxy_to

GIVEN = {"http_proxy": "http://a:1", "HTTP_PROXY": "http://b:1", "HTTPS_PROXY": "http://c:1", "all_proxy": ""}


def test_lower_case_wins() -> None:
    assert proxies(GIVEN) == {"http": "http://a:1", "https": "http://c:1"}
    assert proxies({"no_proxy": "localhost"}) == {}


def test_what_is_set_aside_is_found_again() -> None:
    aside = set_aside({**GIVEN, "ftp_proxy": "http://d:1", "no_proxy": "localhost", "PATH": "/bin"})
    assert aside.keys() == {"no_proxy", "PATH", ENV_PROXIES, ENV_RAY_HOOK}
    assert proxies(aside) == {"http": "http://a:1", "https": "http://c:1", "ftp": "http://d:1"}
    assert set_aside(aside) == aside, "a process of Ray may start another one"


@pytest.mark.parametrize("environ", [{}, {"no_proxy": "*"}, {"http_proxy": ""}])
def test_without_proxies_nothing_is_added(environ: dict[str, str]) -> None:
    assert proxies(environ) == {} and ENV_PROXIES not in set_aside(environ)


def test_hosts_without_proxy_are_added_to_those_of_the_user() -> None:
    given = {**GIVEN, "no_proxy": "a, .b", "NO_PROXY": "c,a"}
    found = without_proxy_to(given, ["n1", "10.0.0.1", "c"])
    assert found["no_proxy"] == found["NO_PROXY"] == "a,.b,c,localhost,127.0.0.1,n1,10.0.0.1"
    assert {name: found[name] for name in GIVEN} == GIVEN
    assert without_proxy_to(found, ["n1"]) == found
    assert without_proxy_to({"no_proxy": "a"}, ["n1"]) == {"no_proxy": "a"}, "there is no proxy"


def test_ray_calls_the_hook_under_this_name() -> None:
    constants = pytest.importorskip("ray._private.ray_constants")
    assert constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR == ENV_RAY_HOOK


PROGRAM = """
import json, os, ray, subprocess, sys
from hpc_rl.software.proxies import set_aside
os.environ.update(http_proxy="http://a:1", HTTPS_PROXY="http://b:2", no_proxy="n1,127.0.0.1", NO_PROXY="n1,127.0.0.1")
kept = set_aside(os.environ)
os.environ.clear()
os.environ.update(kept)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")

@ray.remote
class Actor:
    def seen(self):
        child = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
        return json.loads(subprocess.run(child, capture_output=True, check=True).stdout)

@ray.remote
def task():
    return ray.get(Actor.remote().seen.remote())  # an actor that a worker starts has them too

actor = Actor.options(runtime_env={"env_vars": {"X": "1"}}).remote()
names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "X")
for found in ray.get([task.options(num_cpus=0).remote(), actor.seen.remote()]):
    print({name: found.get(name) for name in names})
"""


def test_actors_and_what_they_start_have_the_proxies_that_rays_processes_lack() -> None:
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    expected = {"http_proxy": "http://a:1", "HTTP_PROXY": "http://a:1", "https_proxy": "http://b:2"}
    expected |= {"HTTPS_PROXY": "http://b:2", "no_proxy": "n1,127.0.0.1"}
    first, second = (ast.literal_eval(line) for line in done.stdout.splitlines()[-2:])
    assert (first, second) == (expected | {"X": None}, expected | {"X": "1"})
