"""Draws the pictures of the documents anew.

    python docs/pictures [FOLDER]

writes SVG files, beside this one if no folder is given: traffic.svg, travels.svg, chunks.svg and packing.svg are drawn
by hand, measured.svg and exact.svg from results of the lab, step.svg from a play of the clock, house.svg from the
imports of the code, generated.svg and solved.svg from schedules that benchmarks/found_schedules.py has saved. Needs
nothing but Python and tawpipe's own code. A test holds the files to what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from measured import measured
from packing import packing
from step import step
from traffic import traffic
from travels import travels

from chunks import chunks
from exact import exact
from house import house
from orders import generated, solved

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (traffic, travels, measured, exact, chunks, packing, step, house, generated, solved):
        path = folder / f"{draw.__name__}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path)
