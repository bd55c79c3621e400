"""Activation pipelines: weights stay with a stage, activations travel.

    layout       which blocks make a stage, and where the stages are
    work         what a position of the pipeline does, and when, by a clock of its own
    orders       the published orders: 1F1B, interleaved 1F1B, zero bubble
    arrange      an order for any layout, made for given costs
    generate     partition, placement and order made together for them
    moves        layouts that differ a little, and bounds of their time
    passes       list scheduling forward and backward in time, the fast twin of the clock
    room         what still fits into memory so that all under way can end
    ticks        costs in whole numbers
    times        costs as text, and from sizes
    memory       what an order keeps in memory in the worst of all timings, and what makes that safe
    fitting      fixed ways within a limit of memory
    listing      orders by playing, as memory has room
    solve        order, offloading and reloading under a limit of memory, by a solver
    constraints  the program that the solver is given
    rounded      costs in whole ticks, for it
    bounds       how short a step can be at best
    program      from all of these to the actions of every rank

A *position* is a rank's place in its pipeline; several pipelines can run side by side, each on its own micro-batches.
"""
