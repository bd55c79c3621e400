"""The Markdown of the repository as pages of the site.

On GitHub the pages in docs/ link to files all over the repository. The site has no repository beside it, so every file
that a page links to comes along: Markdown as a page, source code as a page that shows it, a folder as a list of its
files, anything else as it is. What lies outside of docs/ stands in ``repository/``.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".sbatch": "bash"}
"""Endings of files that get a page, with the language of their code."""
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")


def collect(root: Path, folder: Path) -> None:
    """Writes the pages of docs/, and of all files that they link to.

    Args:
        root: of the repository.
        folder: where the pages go. It is made.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    waiting = [*sorted((root / "docs").glob("*.md"))]
    done: set[Path] = set()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        page = folder / _page_of(source, root)
        page.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            text, linked = _with_links(source.read_text(encoding="utf-8"), source, root)
            page.write_text(text, encoding="utf-8")
            waiting += linked
        elif source.is_dir():
            members = [one for one in sorted(source.iterdir()) if one.is_file()]
            lines = [f"* [{one.name}]({_relative(_page_of(one, root), page.parent, folder)})" for one in members]
            page.write_text("\n".join([f"# {_name(source, root)}", "", *lines, ""]), encoding="utf-8")
            waiting += members
        elif page.suffix == ".md":
            code = source.read_text(encoding="utf-8").rstrip("\n")
            fence = "`" * (max([2, *(len(ticks) for ticks in re.findall(r"`{3,}", code))]) + 1)
            language = LANGUAGES.get(source.suffix, "text")
            page.write_text(f"# {_name(source, root)}\n\n{fence}{language}\n{code}\n{fence}\n", encoding="utf-8")
        else:
            shutil.copyfile(source, page)


def _with_links(text: str, source: Path, root: Path) -> tuple[str, list[Path]]:
    """The text with links that are right on the site, and the files that it links to."""
    linked: list[Path] = []
    here = _page_of(source, root).parent

    def on_site(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        other = (source.parent / target).resolve()
        if not other.exists():
            raise FileNotFoundError(f"{source.relative_to(root)}: the link to {target} leads nowhere")
        linked.append(other)
        return f"{before}{_relative(_page_of(other, root), here, Path())}{anchor or ''}{after}"

    # Every second part is code, in which brackets are no links.
    parts = CODE.split(text)
    parts[::2] = [LINK.sub(on_site, part) for part in parts[::2]]
    return "".join(parts), linked


def _page_of(source: Path, root: Path) -> Path:
    """Where a file of the repository is on the site, from its top."""
    docs = root / "docs"
    place = source.relative_to(docs) if source.is_relative_to(docs) else Path("repository") / source.relative_to(root)
    if source.is_dir():
        return place / "index.md"
    if source == docs / "README.md":
        return Path("index.md")
    shown = source.suffix in LANGUAGES or not source.suffix
    return place.with_name(f"{place.name}.md") if shown else place


def _relative(page: Path, here: Path, top: Path) -> str:
    return Path(os.path.relpath(top / page, here)).as_posix()


def _name(source: Path, root: Path) -> str:
    return str(source.relative_to(root))
