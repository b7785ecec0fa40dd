"""The command group `image`: Apptainer images that jobs run in."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rl.cli.app import JsonOption, app, leave, note, path
from hpc_rl.system.files import read_json

if TYPE_CHECKING:
    from hpc_rl.images.build import ImageBuild
    from hpc_rl.images.inspect import ImageReport

image_app = typer.Typer(
    help="Build, unpack and check Apptainer images.\n\nExample: hpc-rl image check hpc-rl.sif",
    no_args_is_help=True,
)
app.add_typer(image_app, name="image")


class Format(StrEnum):
    sif = "sif"
    sandbox = "sandbox"


OutOption = Annotated[
    Path, typer.Option(parser=path, help="Image to write. Its source and versions are recorded in OUT.json.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing image.")]
FormatOption = Annotated[Format, typer.Option("--format", help="sif: an image file; sandbox: an unpacked folder.")]


@image_app.command()
def build(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Source: docker://NAME:TAG, docker-daemon:NAME, docker-archive:FILE, oci-archive:FILE or a SIF file.",
        ),
    ],
    out: OutOption,
    form: FormatOption = Format.sif,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Variable of the definition: extras=rl, python=python3.12, pip=... Repeatable."
        ),
    ] = None,
    definition: Annotated[
        Path | None,
        typer.Option(parser=path, help="Definition file to use instead of the shipped one.", show_default=False),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Build an image that jobs run in, from any Docker image with Python, and install hpc-rl into it.

    Example: hpc-rl image build --from docker://pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime --out hpc-rl.sif
    """
    from hpc_rl.images.build import ImageBuild
    from hpc_rl.images.definition import parse_source

    is_sandbox = form == Format.sandbox
    _make(ImageBuild(parse_source(source), out, is_sandbox, True, build_arg or (), definition, force))


@image_app.command()
def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Source, as for `hpc-rl image build --from`.")],
    out: OutOption,
    form: FormatOption = Format.sif,
    force: ForceOption = False,
) -> None:
    """Download an image without changing it or installing hpc-rl into it.

    Example: hpc-rl image pull docker://python:3.12-slim --out python.sif
    """
    from hpc_rl.images.build import ImageBuild
    from hpc_rl.images.definition import parse_source

    _make(ImageBuild(parse_source(source), out, form == Format.sandbox, with_project=False, force=force))


@image_app.command()
def unpack(
    image: Annotated[str, typer.Argument(metavar="SIF", help="Image to unpack.")],
    out: Annotated[
        Path, typer.Argument(parser=path, metavar="FOLDER", help="Folder to write, on a local disk of the nodes.")
    ],
    force: ForceOption = False,
) -> None:
    """Unpack an image into a folder, from which jobs run without a FUSE mount (--image FOLDER).

    Example: hpc-rl image unpack hpc-rl.sif /local/hpc-rl
    """
    from hpc_rl.images.build import ImageBuild
    from hpc_rl.images.definition import parse_source
    from hpc_rl.images.sif import check_image

    check_image(Path(image))
    _make(ImageBuild(parse_source(image), out, sandbox=True, with_project=False, force=force))


@image_app.command()
def check(
    image: Annotated[Path, typer.Argument(parser=path, metavar="IMAGE", help="SIF file or unpacked folder.")],
    python: Annotated[str, typer.Option(help="Python inside the image (container.python).")] = "python3",
    as_json: JsonOption = False,
) -> None:
    """Start an image and list its versions, CUDA, InfiniBand and /dev/shm. The exit code is 1 if it cannot be used.

    Example: hpc-rl image check hpc-rl.sif
    """
    from hpc_rl.images.inspect import inspect_image

    report = inspect_image(image, python)
    print(json.dumps(asdict(report), indent=2) if as_json else _report_text(report))
    leave(1 if report.problems else 0)


def _make(order: ImageBuild) -> None:
    from hpc_rl.images.build import make

    if order.source.is_moving:
        note(f"{order.source.uri} may refer to another image later: NAME@sha256:DIGEST always names the same one")
    try:
        written = make(order)
    except KeyboardInterrupt:
        note("interrupted: the incomplete image was removed")
        leave(130)
    facts = read_json(written, named=True)
    print(f"{order.out}: {facts['source']}, digest {facts['digest'] or 'unknown'}; origin in {written.name}")


def _report_text(report: ImageReport) -> str:
    facts = report.facts
    rows: list[tuple[str, object]] = [("image", report.image), ("runtime", report.runtime)]
    rows += [(key, report.origin[key]) for key in ("source", "digest", "built") if report.origin.get(key)]
    if facts:
        cuda, fabric = facts.get("cuda"), facts["infiniband"]
        rows += [("python", f"{facts['python']} ({facts['executable']})"), *facts["packages"].items()]
        rows.append(("CUDA", f"{cuda['built_for']}, {cuda['devices']} devices" if cuda else "unknown without torch"))
        rows.append(("InfiniBand", ", ".join(fabric) or "none on this machine"))
        rows.append(("/dev/shm", f"{facts['shm_bytes'] / 1e9:.1f} GB free"))
    rows += [("warning", text) for text in report.warnings] + [("problem", text) for text in report.problems]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
