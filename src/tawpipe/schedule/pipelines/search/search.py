"""Registers the searches that pipelines with orders made for their costs call."""

from __future__ import annotations

from tawpipe.schedule.pipelines.made import SEARCH, OrderSearch
from tawpipe.schedule.pipelines.search import arrange, fitting
from tawpipe.schedule.pipelines.search.generate import generate
from tawpipe.schedule.pipelines.search.keeping import choose
from tawpipe.schedule.pipelines.search.slicing import listed
from tawpipe.schedule.pipelines.search.solve import solve

SEARCH.register(
    OrderSearch(
        arrange=arrange.arrange,
        continuing=arrange.continuing,
        listed=listed,
        generate=generate,
        fastest=fitting.fastest,
        continuing_in_memory=fitting.continuing,
        choose=choose,
        solve=solve,
    )
)
