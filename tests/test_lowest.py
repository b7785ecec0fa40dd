import configparser
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_constraints_are_the_lower_bounds() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    required = setup["options"]["install_requires"] + extras["train"] + extras["rl"]
    bounds = dict(re.findall(r"^([\w-]+)(?:\[.*\])?>=([\d.]+)", required, re.MULTILINE))
    del bounds["vllm"]  # it needs one version of torch
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "tests" / "lowest.txt").read_text(), re.MULTILINE))
    assert pins.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert pins[name] == bound or re.fullmatch(re.escape(bound) + r"(\.0)+", pins[name]), name


def test_an_unknown_row_is_refused_before_any_is_run() -> None:
    done = subprocess.run([".ci/test-versions", "lowest", "newest"], cwd=ROOT, capture_output=True, text=True)
    expected = (2, "", "newest is no row: lowest, or a Python such as 3.13\n")
    assert (done.returncode, done.stdout, done.stderr) == expected
