"""Draws the pictures of the documents anew.

    python docs/pictures

writes the SVG files beside this one: traffic.svg is drawn by hand, measured.svg from results of the lab, house.svg from
the imports of the code. Needs nothing but Python. A test holds the files to what this writes.
"""

from __future__ import annotations

from pathlib import Path

from house import house
from measured import measured
from traffic import traffic

if __name__ == "__main__":
    for draw in (traffic, measured, house):
        path = Path(__file__).parent / f"{draw.__name__}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path)
