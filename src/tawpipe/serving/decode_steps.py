"""Computation and messages of one rank during decode steps: passes through its stage, and transfers to the next stage.

Only the first stage talks to the owner of the requests. Every later stage learns about a pass from the header of its
message, which precedes the hidden states. A message is as long as its pass needs. Receives are posted before that
length is known, with a buffer for the longest message.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.runtime.compute.step_input import DecodeInput
from tawpipe.runtime.frame import Frame
from tawpipe.runtime.transport.compression import decode, encode
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Buffer, Kind, block_input, context, ids
from tawpipe.schedule.sizes.footprint import TRAVELLING
from tawpipe.schedule.spec import compressed_bytes
from tawpipe.serving.passes import Drawn, Pass, PassFeeder, Row, Sampling
from tawpipe.serving.stage import StayingStage

MOST_TOLD = 20
"""Maximum number of likeliest tokens that are reported along with a drawn token."""
ALIGNED = 16
"""Alignment in bytes of the hidden states in a message, so that values of any type can be read there."""
_HEAD, _ROW = struct.Struct("<ii"), struct.Struct("<iiiii?didqi")
_TOKEN, _LIKELY, _ID = struct.Struct("<iiidi"), struct.Struct("<id"), 4


def header_of(pass_: Pass) -> bytes:
    """Encode a pass as the header of its message, for the stages after the first one.

    It contains for each row: slot, position, number of tokens, sampling settings, and the ids of the known tokens. The
    ids of the row's own tokens are not included, because only the first stage embeds them."""
    parts = [_HEAD.pack(len(pass_.rows), pass_.last)]
    for row in pass_.rows:
        drawn = row.draw is not None
        counts = len(row.tokens), row.likeliest, len(row.known)
        parts.append(_ROW.pack(row.slot, row.first, *counts, drawn, *(row.draw or Sampling())))
        parts.append(struct.pack(f"<{len(row.known)}i", *row.known))
    return b"".join(parts).ljust(header_bytes(pass_.rows), b"\0")


def header_bytes(rows: Sequence[Row]) -> int:
    """Return the size in bytes of the header of a pass with these rows."""
    known = sum(len(row.known) for row in rows)
    return -(-(_HEAD.size + len(rows) * _ROW.size + known * _ID) // ALIGNED) * ALIGNED


def read_header(message: bytes, group: int) -> Pass:
    """Decode a header that ``header_of`` made into a pass of group ``group``. The token ids of its rows are zeros."""
    count, last = _HEAD.unpack_from(message)
    rows, at = [], _HEAD.size
    for _ in range(count):
        slot, first, length, likeliest, told, drawn, *sampling = _ROW.unpack_from(message, at)
        known = struct.unpack_from(f"<{told}i", message, at + _ROW.size)
        rows.append(Row(slot, first, (0,) * length, Sampling(*sampling) if drawn else None, known, likeliest))
        at += _ROW.size + told * _ID
    return Pass(group, tuple(rows), bool(last))


def drawn_message(drawn: list[Drawn]) -> bytes:
    """Encode drawn and scored tokens as a message from the last stage to the first one."""
    parts = [_HEAD.pack(len(drawn), 0)]
    for token in drawn:
        parts.append(_TOKEN.pack(*token[:-1], len(token.top)))
        parts += [_LIKELY.pack(*likely) for likely in token.top]
    return b"".join(parts)


def read_drawn(message: bytes) -> list[Drawn]:
    """Decode a message that ``drawn_message`` made."""
    (count, _), at, drawn = _HEAD.unpack_from(message), _HEAD.size, list[Drawn]()
    for _ in range(count):
        *token, told = _TOKEN.unpack_from(message, at)
        begin, at = at + _TOKEN.size, at + _TOKEN.size + told * _LIKELY.size
        drawn.append(Drawn(*token, top=tuple(_LIKELY.iter_unpack(message[begin:at]))))
    return drawn


class ServeCompute:
    """Computation of one rank in decode steps, for ``Executor.loop``.

    Args:
        stage: stage with the weights of this rank's blocks.
        feeder: source of the passes, on the rank of the first stage; None on the other ranks.
        compression: format of hidden states sent between stages: ``int8``, or empty for none.
    """

    def __init__(self, stage: StayingStage, feeder: PassFeeder | None, *, compression: str = "") -> None:
        self.stage, self.chain, self.feeder, self.compression = stage, stage.chain, feeder, compression
        self.stream: Any = None
        """CUDA stream that computes; None on a CPU."""
        self._held: dict[Buffer, Any] = {}
        """Values by their buffer in the schedule: a pass with its hidden states, arguments of layers, or a message."""
        self._under_way = deque[torch.Event]()
        slot_layout = stage.slot_layout
        rows, tokens = slot_layout.slots + 1, slot_layout.slots + slot_layout.chunk
        longest = [Row(0, 0, (), known=(0,) * slot_layout.chunk), *[Row(0, 0, ())] * slot_layout.slots]
        self._longest_header, self._nothing = header_bytes(longest), self._hidden(0)
        self._receive_bytes = {
            Kind.INPUT: self._longest_header + self._hidden_bytes(tokens),
            Kind.IDS: _HEAD.size + (rows + slot_layout.chunk) * (_TOKEN.size + MOST_TOLD * _LIKELY.size),
        }

    def forward(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Compute one block for one group's pass, store the output for the next block, and drop the ``frees``.

        Block 0 first returns the tokens of the group's previous pass to the feeder, and gets the next pass from it,
        which may wait. The last block stores the message with the drawn tokens."""
        block, group = action.block, action.micro_batch
        last = len(self.chain.blocks) - 1
        if block == 0:
            output: Any = self._embed(group, frame.inputs)
        else:
            carried, hidden = self._held[block_input(group, block)]
            if block == last:
                output = _as_tensor(drawn_message(self.stage.head(hidden, carried)))
            else:
                if carried.rows:
                    hidden = self.stage.layer(block, hidden, self._held[context(group)])
                output = carried, hidden
        self._held[ids(group) if block == last else block_input(group, block + 1)] = output
        for buffer in action.frees:
            self._held.pop(buffer, None)

    def prepare(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Run a PREPARE action on a later stage: decode a received message, and compute the layer arguments.

        The pass with its hidden states replaces the message. The arguments are stored for the layers of this stage.
        ``frame.inputs.last`` becomes True if the pass is the last one."""
        (arrived,) = action.reads
        carried, hidden = self._read(self._held[arrived], action.micro_batch)
        frame.inputs.last |= carried.last
        self._held[arrived] = carried, hidden
        self._held[context(action.micro_batch)] = self.stage.calls(carried) if carried.rows else ()

    def travel(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Run an EXCHANGE action: send and receive messages of hidden states or drawn tokens.

        Sent messages are dropped from this rank, and received ones are stored. On CUDA, first wait until at most
        ``TRAVELLING`` - 1 earlier exchanges are still running."""
        on_cuda, tensors = self.chain.device.type == "cuda", dict[Buffer, Tensor]()
        if len(self._under_way) == TRAVELLING:
            self._under_way.popleft().synchronize()
        for transfer in action.transfers:
            if transfer.send:
                message = self._message(self._held.pop(transfer.buffer))
                if frame.transport.early_transfers is None:  # the receive expects a message of full length
                    size = self._receive_bytes[transfer.buffer.kind]
                    message = torch.nn.functional.pad(message, (0, size - message.numel()))
                tensors[transfer.buffer] = message.to(self.chain.device)
        if frame.transport.early_transfers is None:
            tensors |= self.receive_buffers(action, frame)
        received = frame.transport.exchange(action, tensors)
        self._held.update(received)
        if on_cuda:  # keep the memory until the other lane has read it
            for tensor in tensors.values():
                tensor.record_stream(torch.cuda.current_stream())
            for tensor in received.values():
                tensor.record_stream(self.stream)
            self._under_way.append(torch.cuda.current_stream().record_event())

    def receive_buffers(self, action: Action, frame: Frame[DecodeInput]) -> dict[Buffer, Tensor]:
        """Return empty buffers for the longest messages that an EXCHANGE action may receive."""
        empty = partial(torch.empty, dtype=torch.uint8, device=self.chain.device)
        return {buffer: empty(self._receive_bytes[buffer.kind]) for buffer in action.writes}

    def _embed(self, group: int, inputs: DecodeInput) -> tuple[Pass, Tensor]:
        """Return the tokens of a group's previous pass to the feeder, get the next pass, and compute its embedding.

        The arguments of the layers are stored. ``inputs.last`` becomes True if the pass is the last one.

        Returns:
            The pass and its hidden states [1, tokens, hidden]; with 0 tokens for an empty pass.
        """
        assert self.feeder is not None, "the first stage is where the requests are"
        message = self._held.pop(ids(group), None)  # None in the first decode step
        if message is not None:
            self.feeder.take(group, read_drawn(_as_bytes(message)))
        fed = self.feeder.feed(group)
        assert fed.group == group, f"asked for a pass of group {group}, and was given one of group {fed.group}"
        inputs.last |= fed.last
        hidden, self._held[context(group)] = self.stage.embed(fed) if fed.rows else (self._nothing, ())
        return fed, hidden

    def _message(self, held: Any) -> Tensor:
        """Encode a pass and its hidden states as one uint8 message; return a message unchanged.

        Args:
            held: (pass, hidden states), or a message with drawn tokens.

        Raises:
            UserError: the model's hidden states do not have the expected shape or type.
        """
        if isinstance(held, Tensor):
            return held
        carried, hidden = held
        header = _as_tensor(header_of(carried))
        tokens = sum(len(row.tokens) for row in carried.rows)
        if tuple(hidden.shape) != (1, tokens, self.chain.width) or hidden.dtype != self.chain.dtype:
            expected = f"hidden states (1, {tokens}, {self.chain.width}) in {self.chain.dtype} where a stage ends"
            raise UserError("model", self.chain.name, f"{expected}, not {tuple(hidden.shape)} in {hidden.dtype}")
        if hidden.device.type == "cuda":  # keep the memory of COMPUTE's tensor until this stream has read it
            hidden.record_stream(torch.cuda.current_stream())
        message = torch.empty(len(header) + self._hidden_bytes(tokens), dtype=torch.uint8, device=hidden.device)
        message[: len(header)].copy_(header)
        if self.compression:
            encode(hidden.flatten(), self.compression, message[len(header) :])
        else:
            message[len(header) :].copy_(hidden.contiguous().view(torch.uint8).flatten())
        return message

    def _read(self, message: Tensor, group: int) -> tuple[Pass, Tensor]:
        """Decode a message into its pass and its hidden states, [1, tokens, width]."""
        carried = read_header(_as_bytes(message[: self._longest_header]), group)
        begin, tokens = header_bytes(carried.rows), sum(len(row.tokens) for row in carried.rows)
        part = message[begin : begin + self._hidden_bytes(tokens)]
        if not self.compression:
            return carried, part.view(self.chain.dtype).view(1, tokens, self.chain.width)
        hidden = self._hidden(tokens)
        decode(part, self.compression, hidden.view(-1))
        return carried, hidden

    def _hidden(self, tokens: int) -> Tensor:
        """Return an uninitialised tensor for the hidden states of ``tokens`` tokens."""
        return torch.empty(1, tokens, self.chain.width, dtype=self.chain.dtype, device=self.chain.device)

    def _hidden_bytes(self, tokens: int) -> int:
        """Return the bytes of the hidden states of ``tokens`` tokens in a message."""
        numbers = tokens * self.chain.width
        return compressed_bytes(numbers) if self.compression else numbers * self.chain.dtype.itemsize


def _as_tensor(message: bytes) -> Tensor:
    """Copy bytes to a uint8 tensor on the CPU."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _as_bytes(message: Tensor) -> bytes:
    """Copy a uint8 tensor to bytes; waits for its device."""
    return message.cpu().numpy().tobytes()
