"""Writes the pages from which the site is built: python docs/site [FOLDER]. `make docs` does it and builds the site."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from reference import reference_pages
from sources import collect

ROOT = Path(__file__).resolve().parent.parent.parent

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    collect(ROOT, folder)
    shutil.copyfile(Path(__file__).parent / "site.css", folder / "site.css")
    for name, text in reference_pages().items():
        (folder / name).write_text(text, encoding="utf-8")
