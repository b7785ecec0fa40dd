import pytest

from hpc_rl.errors import UserError
from hpc_rl.software.ray_version import check_ray


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "has no Ray: /venv/bin/python -m pip install"),
        ("2.51.1", "Ray 2.51.1, which anybody on the network could use"),
        ("1.99", "Ray 1.99"),
    ],
)
def test_a_ray_without_token_authentication_is_refused(version: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_ray(version, "/venv/bin/python")
    check_ray("2.52.0", "python")
    check_ray("3.0.0rc1", "python")
