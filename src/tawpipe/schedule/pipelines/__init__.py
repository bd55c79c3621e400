"""Activation pipelines: weights stay with a stage, activations travel.

    strategy     the strategies, with those of published orders
    made         those whose orders, or stages, are made for costs
    layout       which blocks make a stage, and where the stages are
    positions    where the positions of a pipeline are
    work         what a position of the pipeline does, and when, by a clock of its own
    times        costs as text, and from sizes
    orders       the published orders: 1F1B, interleaved 1F1B
    periodic     orders of any length, from one whose middle goes on
    memory       what an order keeps in memory in the worst of all timings, and what makes that safe
    program      from all of these to the actions of every rank
    search       orders and stages for given costs; no run imports it that needs none

A *position* is a rank's place in its pipeline; several pipelines can run side by side, each on its own micro-batches.
"""
