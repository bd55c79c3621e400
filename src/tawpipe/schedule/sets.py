"""Rows that several ranks of a node compute together: a set of them has the same micro-batches, and each of its ranks
computes some tokens of every row (pieces.py).

All that ties the tokens of a row together in a layer are keys and values. So a layer's visit becomes: every rank runs
its own tokens as far as their keys and values (KEYS), these are gathered, and the layer attends to all of them. Its
backward pass adds to the gradients of all keys and values; these are summed up over the set, and every rank propagates
the sums of its own to the weights and to the layer's input (KEYS_BACKWARD). What is gathered and summed up travels on a
lane of its own, so that nothing that computes waits inside for another rank.

It is done to a finished schedule, for every strategy whose ranks visit the layers in one order. Keys and values of the
next micro-batch of a visit come before the layer computes this one, and gradients of the one before go on after it, so
that both travel meanwhile; two micro-batches at most have keys and values at one time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import KEPT, Buffer, Kind, context, input_gradient, key_gradients, keys
from tawpipe.schedule.step import Schedule
from tawpipe.topology import set_group


def in_sets(schedule: Schedule) -> Schedule:
    """The same schedule for sets of as many ranks as its settings say, which compute some or all micro-batches."""
    ranks, blocks = schedule.step.sequence_ranks, schedule.model.blocks
    if ranks == 1 or schedule.step.shared == 0:
        return schedule
    group, programs = set_group(ranks), []
    for program in schedule.programs:
        computing = [(i, action) for i, action in enumerate(program) if action.op in (Op.FORWARD, Op.BACKWARD)]
        instead: dict[int, list[Action]] = {}
        for (_, block), visit in groupby(computing, key=lambda pair: (pair[1].op, pair[1].block)):
            if blocks[block].kind == "layer":
                places, actions = zip(*visit, strict=True)
                shared = [schedule.step.ranks_of(action.micro_batch) > 1 for action in actions]
                instead |= zip(places, _visit(actions, shared, group), strict=True)
        programs.append(tuple(new for i, action in enumerate(program) for new in instead.get(i, (action,))))
    return replace(schedule, programs=tuple(programs))


def _visit(actions: Sequence[Action], shared: Sequence[bool], group: str) -> Iterable[list[Action]]:
    """What takes the place of every action of a layer's visit.

    Args:
        shared: whether a set computes its micro-batch.
    """
    for place, action in enumerate(actions):
        instead = [] if place or not shared[0] else _gathered(action, group)
        if any(shared[place + 1 : place + 2]):
            instead += _gathered(actions[place + 1], group)
        backward, last = action.op is Op.BACKWARD, place == len(actions) - 1
        before = [_keys_backward(actions[place - 1])] if backward and place and shared[place - 1] else []
        if not shared[place]:
            yield [*instead, action, *before]
            continue
        kv, dkv = keys(action.micro_batch, action.block), key_gradients(action.micro_batch, action.block)
        if not backward:
            yield [*instead, replace(action, reads=(*action.reads, kv), frees=(*action.frees, kv))]
            continue
        frees = (*(buffer for buffer in action.frees if _ends(buffer, action)), kv)
        instead += [
            replace(action, reads=(*action.reads, kv), writes=(*action.writes, dkv), frees=frees),
            _collective("reduce_scatter", dkv, group),
        ]
        yield [*instead, *before, *([_keys_backward(action)] if last else [])]


def _gathered(action: Action, group: str) -> list[Action]:
    """The keys and values of all tokens, for a layer's action."""
    m, block = action.micro_batch, action.block
    needed = tuple(
        buffer for buffer in action.reads if buffer.is_weight or buffer == context(m) or _is_input(buffer, block)
    )
    kv = keys(m, block)
    compute = Action(Op.KEYS, Lane.COMPUTE, needed, (kv,), block=block, micro_batch=m)
    return [compute, _collective("all_gather", kv, group)]


def _is_input(buffer: Buffer, block: int) -> bool:
    """True for a block's input; what its actions read of other blocks, they only free."""
    of_block = buffer.kind in (Kind.INPUT, Kind.OFFLOADED) and buffer.at[1] == block
    return of_block or buffer.kind is Kind.RELOADED


def _ends(buffer: Buffer, action: Action) -> bool:
    """True for what a layer's BACKWARD reads and KEYS_BACKWARD does not."""
    return buffer == input_gradient(action.micro_batch, action.block + 1) or buffer.kind in KEPT


def _collective(which: str, buffer: Buffer, group: str) -> Action:
    m, block = buffer.at
    return Action(
        Op.COLLECTIVE, Lane.SEQ, (buffer,), (buffer,), collective=which, group=group, block=block, micro_batch=m
    )


def _keys_backward(action: Action) -> Action:
    """KEYS_BACKWARD after a layer's BACKWARD, as that was without sets: it adds to the same gradients, and frees what
    that would have freed.
    """
    dkv = key_gradients(action.micro_batch, action.block)
    needed = (buffer for buffer in action.reads if not buffer.is_gradient and not _ends(buffer, action))
    frees = (*(buffer for buffer in action.frees if not _ends(buffer, action)), dkv)
    reads = (*needed, dkv, *action.writes)
    return replace(action, op=Op.KEYS_BACKWARD, reads=reads, frees=frees)
