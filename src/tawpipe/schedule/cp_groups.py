"""Context parallelism: several ranks of a node compute one row together.

The ranks of a context-parallel group have the same micro-batches, and each computes some tokens of every row
(pieces.py). Tokens of a row depend on each other in a layer only through keys and values. So a layer's visit has more
steps: every rank computes keys and values of its own tokens (KEYS), these are gathered, and the layer attends to all of
them. Its backward pass adds to the gradients of all keys and values. These are summed over the group, and every rank
backpropagates the sums of its own tokens to the weights and the layer's input (KEYS_BACKWARD). The collectives run on a
lane of their own, so that no computing action waits inside for another rank.

The change is applied to a finished schedule, for every strategy whose ranks visit the layers in one order. Keys and
values of a visit's next micro-batch are computed before the layer computes the present one. Key gradients of the
previous micro-batch are used after it. So both travel while the layer computes, and at most two micro-batches have keys
and values at one time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import BALANCE, KEPT, Buffer, Kind, context, input_gradient, key_gradients, keys
from tawpipe.schedule.step import Schedule
from tawpipe.topology import cp_group_name


def with_cp_groups(schedule: Schedule) -> Schedule:
    """Return ``schedule`` changed for context-parallel groups: keys and values are computed first and gathered.

    KEYS, KEYS_BACKWARD and collectives of keys and their gradients are added to layers. Returns ``schedule`` itself if
    every micro-batch is computed by one rank."""
    ranks, blocks = schedule.step.sequence_ranks, schedule.model.blocks
    if ranks == 1 or schedule.step.shared == 0:
        return schedule
    group, programs = cp_group_name(ranks), []
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
    """Return for each action of a layer's visit the list of actions that replace it.

    Keys of the next micro-batch are computed and gathered before the present one computes, so that the transfer
    overlaps. KEYS_BACKWARD follows one action later, for the same reason.

    Args:
        actions: FORWARD or BACKWARD actions of the visit, one for each micro-batch.
        shared: for each action, True if a context-parallel group computes its micro-batch.
        group: name of the context-parallel group.
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
    """Return a KEYS and an all-gather of its result, which make the keys and values for the layer's ``action``."""
    m, block = action.micro_batch, action.block
    needed = tuple(
        buffer for buffer in action.reads if buffer.is_weight or buffer == context(m) or _is_input(buffer, block)
    )
    kv = keys(m, block)
    compute = Action(Op.KEYS, Lane.COMPUTE, needed, (kv,), block=block, micro_batch=m)
    return [compute, _collective("all_gather", kv, group)]


def _is_input(buffer: Buffer, block: int) -> bool:
    """Return True if ``buffer`` is the input of ``block``.

    Inputs of other blocks among the reads of a layer's action are only freed by it.
    """
    of_block = buffer.kind in (Kind.INPUT, Kind.OFFLOADED) and buffer.at[1] == block
    return of_block or buffer.kind is Kind.RELOADED


def _ends(buffer: Buffer, action: Action) -> bool:
    """Return True if a layer's BACKWARD ``action`` frees ``buffer`` itself, because KEYS_BACKWARD does not need it."""
    return buffer == input_gradient(action.micro_batch, action.block + 1) or buffer.kind in KEPT


def _collective(which: str, buffer: Buffer, group: str) -> Action:
    """Return an in-place COLLECTIVE of ``buffer`` (keys or their gradients) on the lane SEQ."""
    m, block = buffer.at
    return Action(
        Op.COLLECTIVE, Lane.SEQ, (buffer,), (buffer,), collective=which, group=group, block=block, micro_batch=m
    )


def _keys_backward(action: Action) -> Action:
    """Return the KEYS_BACKWARD that follows a layer's BACKWARD ``action`` and its reduction of key gradients.

    It adds to the gradients that BACKWARD writes, and frees the buffers that BACKWARD would otherwise free at its end.
    """
    dkv = key_gradients(action.micro_batch, action.block)
    needed = (buffer for buffer in action.reads if not buffer.is_gradient and not _ends(buffer, action))
    frees = (*(buffer for buffer in action.frees if not _ends(buffer, action)), dkv)
    writes = tuple(buffer for buffer in action.writes if buffer != BALANCE)
    return replace(action, op=Op.KEYS_BACKWARD, reads=(*needed, dkv, *writes), writes=writes, frees=frees)
