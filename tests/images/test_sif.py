"""An image that cannot be used is refused before anything starts."""

from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.images.sif import check_image
from tests.fake_apptainer import sif_bytes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"x\.sif: no such file or directory"),
        (b"", r"x\.sif is not a SIF file \(0 bytes"),
        (sif_bytes(magic=b"NO_MAGIC"), r"x\.sif is not a SIF file"),
        (b"<html>404</html>" * 100, r"is not a SIF file .* hpc-rl image build --from SOURCE --out"),
        (sif_bytes(size=1000)[:900], r"is incomplete: it has 900 of 1,000 bytes"),
        (sif_bytes(b"04"), r"is for arm64, but the nodes are amd64: .* container\.arch=arm64"),
    ],
)
def test_a_file_that_no_node_can_run_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    image = tmp_path / "x.sif"
    if content is not None:
        image.write_bytes(content)
    with pytest.raises(UserError, match=said):
        check_image(image, "amd64")


def test_what_can_run_passes(tmp_path: Path) -> None:
    image = tmp_path / "x.sif"
    image.write_bytes(sif_bytes(b"04"))
    check_image(image, "arm64")
    (tmp_path / "box" / "usr").mkdir(parents=True)
    check_image(tmp_path / "box")
    with pytest.raises(UserError, match="not an unpacked image"):
        check_image(tmp_path / "box" / "usr")
