"""Hooks of MkDocs: pages of the site that come from the code or from files outside docs/ (`make docs`).

Nothing that is generated here is committed. The functions that build pages are pure and need no MkDocs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.config.keys import documented_keys
from hpc_rl.config.kinds import KINDS, offered

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
AT_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages beside docs/ in the repository, and their place in the site."""
SHIPPED = "configs/site"
"""Folder of files that pages link to; it is copied into the site."""


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every page that is not a file in docs/, by its path in the site."""
    pages = {target: relocated((ROOT / source).read_text()) for source, target in AT_ROOT.items()}
    pages |= {f"reference/config-{kind}.md": configuration_page(kind) for kind in (row.name for row in offered())}
    return pages | {f"reference/{name}.md": text for name, text in api_pages().items()}


def relocated(text: str) -> str:
    """Rewrite the links of a page that moves from the repository's root into docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for source, target in AT_ROOT.items():
        text = text.replace(f"]({source}", f"]({target}")
    return text


def site_markdown(text: str) -> str:
    """Adapt a page of docs/ to the site: links that leave docs/, and words after a code block's language."""
    for source, target in AT_ROOT.items():
        text = text.replace(f"](../{source}", f"]({target}")
    text = text.replace(f"](../{SHIPPED}/", f"]({SHIPPED}/")
    return re.sub(r"^( *```\w+) [\w-]+$", r"\1", text, flags=re.MULTILINE)


def configuration_page(kind: str) -> str:
    """Return the reference of a job kind's options: a table for each section of the schema."""
    rows = list(documented_keys(KINDS[kind].schema))
    lines = [
        f"# Options of {kind}",
        "",
        f"`hpc-rl submit {kind}` takes these {len(rows)} options as `key=value`; `hpc-rl config {kind} --help` prints "
        "the same list.",
    ]
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in rows:
        sections.setdefault(row[0].rpartition(".")[0], []).append(row)
    for section, members in sections.items():
        lines += ["", f"## {section}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f'| <a id="{key}"></a>{_code(key)} | {_code(kind_of)} | {_code(default)} | {_cell(meaning)} |'
            for key, kind_of, default, meaning in members
        ]
    return "\n".join(lines) + "\n"


def api_pages() -> dict[str, str]:
    """Return the API reference: an overview, and one page for each package with all of its modules."""
    packages: dict[str, list[str]] = {}
    for module in modules():
        packages.setdefault(module.split(".")[1] if "." in module else "hpc_rl", []).append(module)
    pages = {
        f"api-{package}": f"# {package if package == 'hpc_rl' else f'hpc_rl.{package}'}\n\n"
        + "\n".join(f"::: {name}\n" for name in names)
        for package, names in packages.items()
    }
    overview = [
        "# Python API",
        "",
        "All public functions and classes, from their docstrings. `hpc_rl.algorithms` and `hpc_rl.rewards` are the "
        "packages that most projects build on; [Design](../design.md) describes the layout.",
        "",
        *(f"- [`hpc_rl{'' if name == 'hpc_rl' else f'.{name}'}`](api-{name}.md)" for name in sorted(packages)),
    ]
    return {"api": "\n".join(overview) + "\n", **pages}


def modules() -> Iterator[str]:
    """Yield the dotted names of all modules, packages before their members; the starter project has none."""
    for path in sorted((ROOT / "hpc_rl").rglob("*.py"), key=lambda found: (found.parent, found.name)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.name == "__init__.py":
            parts = parts[:-1]
        if (path.parent / "__init__.py").exists() and not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def _code(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have on the repository's own pages."""
    from pymdownx.slugs import slugify

    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the shipped files that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, text in generated_pages().items():
        level = InclusionLevel.NOT_IN_NAV if path.startswith("reference/api-") else InclusionLevel.UNDEFINED
        files.append(File.generated(config, path, content=text, inclusion=level))
    for source in sorted((ROOT / SHIPPED).iterdir()):
        files.append(File.generated(config, f"{SHIPPED}/{source.name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Any) -> str:
    """Adapt each page before it is rendered."""
    return site_markdown(markdown)
