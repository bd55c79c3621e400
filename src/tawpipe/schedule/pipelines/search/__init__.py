"""The search for orders and stages of a pipeline.

arrange      an order for any layout, made for given costs
zero_bubble  the published order that depends on times
generate     partition, placement and order made together for them
moves        layouts that differ a little, and bounds of their time
slicing      the same where micro-batches are slices of documents
passes       list scheduling forward and backward in time, the fast twin of the clock
room         what still fits into memory so that all under way can end
ticks        costs in whole numbers
fitting      fixed ways within a limit of memory
listing      orders by playing, as memory has room
solve        order, offloading and reloading under a limit of memory, by a solver
constraints  the program that the solver is given
rounded      costs in whole ticks, for it
bounds       how short a step can be at best
"""
