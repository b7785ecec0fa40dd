import configparser
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_constraints_are_the_lower_bounds() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"] + setup["options.extras_require"]["train"]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", required, re.MULTILINE))
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "tests" / "lowest.txt").read_text(), re.MULTILINE))
    assert pins.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert pins[name] == bound or re.fullmatch(re.escape(bound) + r"(\.0)+", pins[name]), name


def test_a_row_of_versions_that_is_not_there_is_refused_before_any_is_run() -> None:
    done = subprocess.run([".ci/test-versions", "3.11-2.11.0", "3.11-1.0"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "tests/versions.txt has no row 3.11-1.0\n")
