import configparser
import re
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
