"""Search for the stages, orders and offloading of pipelines, before a run and beside it.

Code that runs steps never imports this package.

A *work* (``schedule.pipelines.work.Work``) is one stage's computation for one micro-batch. Kinds of works: F forward; B
whole backward pass; I and W its two parts, for the gradients of inputs and of weights; O and R transfers of saved
activations to the CPU memory and back. A *position* is a rank's place in the pipeline. An *order* lists the works of
every position.
"""
