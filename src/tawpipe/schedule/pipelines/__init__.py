"""Activation pipelines: weights stay with a stage, activations travel.

    strategy     the strategies with published orders
    made         the strategies whose orders, or stages, are made for given costs
    layout       which blocks form a stage, and on which position each stage is
    positions    which rank is which position of which pipeline
    work         work items of a position, and a simple clock for them
    times        costs as text, and estimated from sizes
    orders       published orders: 1F1B, interleaved 1F1B
    periodic     orders of any length, made by repeating the middle of a short one
    memory       most memory that an order needs under all timings, and waits that limit it
    program      actions of every rank, made from all of these

The search for orders and stages is in ``tawpipe.orders``; a run that needs no search does not import it. A *position*
is the index of a rank in its pipeline. Several pipelines can run side by side, each with its own micro-batches.
"""
