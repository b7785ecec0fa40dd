"""The search for options that a cluster accepts, with sites that check one rule after another."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpc_rl.sites.choice import MOST_QUESTIONS, Choice, search
from hpc_rl.sites.proposal import choose_partitions, dimensions, first_choice
from hpc_rl.submission.executor import refused_because
from tests.helpers import recorded
from tests.sites.test_proposal import CLUSTERS, facts

FOUND = facts("typed-gres-22.05.8")
FOUND = replace(FOUND, associations=[replace(one, qos=("normal", "gpu-long")) for one in FOUND.associations])
PARTITION = choose_partitions(FOUND)[0]
FIRST = first_choice(FOUND, PARTITION, None)
Rule = tuple[Callable[[Choice], bool], str]
RULES: dict[str, Rule] = {
    "account": (lambda one: one.account == "teaching", "state your project with --account"),
    "qos": (lambda one: one.qos == "gpu-long", "Job 17: invalid qos specification"),
    "gres": (lambda one: one.gpu_option == "gres", "GPUs: use --gres=gpu:TYPE:N"),
    "type": (lambda one: one.gpu_type is not None, "name the type of GPU"),
    "any type": (lambda one: one.gpu_type is None, "Requested node configuration is not available"),
    "memory": (lambda one: one.mem_option == "mem-per-cpu", "request memory by CPU"),
    "no memory": (lambda one: one.mem_option == "none", "Unspecified error"),
    "constraint": (lambda one: one.constraint == "ib", "a constraint is required (-C gen4 or -C ib)"),
    "requeue": (lambda one: one.leave_out == ("requeue",), "--requeue is not allowed here"),
    "time": (lambda one: one.time == "01:00:00", "the time limit of this QoS is one hour"),
    "exclusive": (lambda one: one.exclusive, "request whole nodes with --exclusive"),
}


def site(*names: str, asked: list[Choice]) -> Callable[[Choice], str | None]:
    """Return a cluster that checks these rules in order and states the first one that is broken."""

    def refusal(choice: Choice) -> str | None:
        asked.append(choice)
        return next((message for accepts, message in map(RULES.get, names) if not accepts(choice)), None)  # type: ignore[misc]

    return refusal


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("gres",),
        ("no memory",),
        ("any type",),
        ("account", "gres", "type", "memory", "qos"),
        ("qos", "memory", "type", "gres", "account"),
        ("constraint", "requeue", "time", "exclusive", "account"),
    ],
)
def test_a_strict_site_is_understood(names: tuple[str, ...]) -> None:
    asked: list[Choice] = []
    found, refused = search(FIRST, dimensions(FOUND, PARTITION, FIRST, False), site(*names, asked=asked))
    assert refused is None
    assert all(RULES[name][0](found) for name in names)
    assert len(asked) == len(set(asked)) <= 30
    unneeded = {field for field in vars(FIRST) if getattr(found, field) != getattr(FIRST, field)}
    assert len(unneeded) <= len(names), "only what a refusal requires is changed"


def test_a_site_that_accepts_nothing_is_asked_a_limited_number_of_times() -> None:
    asked: list[Choice] = []

    def refusal(choice: Choice) -> str:
        asked.append(choice)
        return f"no {'x' * len(asked)}"  # a new reason each time

    found, refused = search(FIRST, dimensions(FOUND, PARTITION, FIRST, False), refusal)
    assert (found, refused) == (FIRST, "no x") and len(asked) == MOST_QUESTIONS


def test_the_account_that_the_user_has_chosen_stays() -> None:
    first = replace(FIRST, account="mlgroup")
    asked: list[Choice] = []
    _, refused = search(first, dimensions(FOUND, PARTITION, first, True), site("account", asked=asked))
    assert refused == RULES["account"][1] and {one.account for one in asked} == {"mlgroup"}


@pytest.mark.parametrize("cluster", [name for name in CLUSTERS if name.startswith("strict")])
@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("refused-by-cli-filter-account", "account", "mlgroup"),
        ("refused-by-cli-filter-gpus", "gpu_option", "gres"),
        ("refused-by-cli-filter-type", "gpu_type", "a100"),
        ("refused-by-cli-filter-mem", "mem_option", "mem-per-gpu"),
        ("refused-by-job-submit-qos", "qos", "standard"),
        ("refused-qos", "qos", "standard"),
    ],
)
def test_a_recorded_refusal_names_the_option_to_change(cluster: str, file: str, field: str, value: str) -> None:
    found = facts(cluster)
    partition = choose_partitions(found)[0]
    first = replace(first_choice(found, partition, None), gpu_type=None)
    asked: list[Choice] = []

    def refusal(choice: Choice) -> str | None:
        asked.append(choice)
        return None if getattr(choice, field) == value else refused_because(recorded(cluster, file))

    accepted, refused = search(first, dimensions(found, partition, replace(first, gpu_type="a100"), False), refusal)
    assert refused is None and getattr(accepted, field) == value
    changed = {name for one in asked for name in vars(one) if getattr(one, name) != getattr(first, name)}
    assert changed <= {
        field,
        "gpu_type" if field == "gpu_option" else field,
        "gpu_option" if field == "gpu_type" else field,
    }
