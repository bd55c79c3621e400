"""Registers the search functions that pipelines with orders made for their costs call."""

from __future__ import annotations

from tawpipe.orders import arrange, fitting
from tawpipe.orders.generate import generate
from tawpipe.orders.keeping import choose
from tawpipe.orders.slicing import listed
from tawpipe.orders.solver.solve import solve
from tawpipe.schedule.pipelines.cost_based import SEARCH, OrderSearch

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
