"""Computation and messages of one rank during decode steps: passes through its stage, and transfers to the next stage.

Only the first stage talks to the owner of the requests. Every later stage learns about a pass from the header of its
message, which precedes the hidden states. A message is as long as its pass needs. gloo posts receives before that
length is known, with a buffer for the longest message. NCCL needs equal lengths on both sides. So the beginning of a
message, whose length is fixed, is sent first, and it says how long the rest is. The length of drawn tokens follows from
their pass, which the first stage knows.
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
_HEAD, _ROW = struct.Struct("<iiii"), struct.Struct("<iiiii?didqi")
"""Head: rows, 1 for the last pass, bytes of the header, tokens of all rows."""
_COUNT, _TOKEN, _LIKELY, _ID = struct.Struct("<i"), struct.Struct("<iiidi"), struct.Struct("<id"), 4


def header_of(pass_: Pass) -> bytes:
    """Encode a pass as the header of its message, for the stages after the first one.

    It contains for each row: slot, position, number of tokens, sampling settings, and the ids of the known tokens. The
    ids of the row's own tokens are not included, because only the first stage embeds them."""
    size = header_bytes(pass_.rows)
    parts = [_HEAD.pack(len(pass_.rows), pass_.last, size, _tokens(pass_))]
    for row in pass_.rows:
        drawn = row.draw is not None
        counts = len(row.tokens), row.likeliest, len(row.known)
        parts.append(_ROW.pack(row.slot, row.first, *counts, drawn, *(row.draw or Sampling())))
        parts.append(struct.pack(f"<{len(row.known)}i", *row.known))
    return b"".join(parts).ljust(size, b"\0")


def header_bytes(rows: Sequence[Row]) -> int:
    """Return the size in bytes of the header of a pass with these rows."""
    known = sum(len(row.known) for row in rows)
    return -(-(_HEAD.size + len(rows) * _ROW.size + known * _ID) // ALIGNED) * ALIGNED


def read_header(message: bytes, group: int) -> Pass:
    """Decode a header that ``header_of`` made into a pass of group ``group``. The token ids of its rows are zeros."""
    count, last, *_ = _HEAD.unpack_from(message)
    rows, at = [], _HEAD.size
    for _ in range(count):
        slot, first, length, likeliest, told, drawn, *sampling = _ROW.unpack_from(message, at)
        known = struct.unpack_from(f"<{told}i", message, at + _ROW.size)
        rows.append(Row(slot, first, (0,) * length, Sampling(*sampling) if drawn else None, known, likeliest))
        at += _ROW.size + told * _ID
    return Pass(group, tuple(rows), bool(last))


def drawn_bytes(rows: Sequence[Row]) -> int:
    """Return the bytes of a message with the drawn and scored tokens of a pass with these rows, with all likeliest."""
    told = [row.likeliest for row in rows for _ in row.known]
    told += [row.draw.logprobs for row in rows if row.draw is not None]
    return _COUNT.size + len(told) * _TOKEN.size + sum(told) * _LIKELY.size


def drawn_message(drawn: list[Drawn]) -> bytes:
    """Encode drawn and scored tokens as a message from the last stage to the first one."""
    parts = [_COUNT.pack(len(drawn))]
    for token in drawn:
        parts.append(_TOKEN.pack(*token[:-1], len(token.top)))
        parts += [_LIKELY.pack(*likely) for likely in token.top]
    return b"".join(parts)


def read_drawn(message: bytes) -> list[Drawn]:
    """Decode a message that ``drawn_message`` made."""
    (count,), at, drawn = _COUNT.unpack_from(message), _COUNT.size, list[Drawn]()
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
        self._beginning, self._nothing = header_bytes([Row(0, 0, ())] * rows), self._hidden(0)
        """Least bytes of a message, which are sent first with NCCL: the longest header without known tokens."""
        self._drawn_bytes = dict[int, int]()
        """Bytes of the message with the tokens of each group's pass, on the first stage."""
        self._receive_bytes = {
            Kind.INPUT: self._beginning + slot_layout.chunk * _ID + ALIGNED + self._hidden_bytes(tokens),
            Kind.IDS: _COUNT.size + (rows + slot_layout.chunk) * (_TOKEN.size + MOST_TOLD * _LIKELY.size),
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
                drawn = drawn_message(self.stage.head(hidden, carried))
                output = _as_tensor(drawn.ljust(drawn_bytes(carried.rows), b"\0"))
            else:
                if carried.rows:
                    hidden = self.stage.layer(block, hidden, self._held[context(group)])
                output = carried, hidden
        self._held[ids(group) if block == last else block_input(group, block + 1)] = output
        for buffer in action.frees:
            self._held.pop(buffer, None)

    def prepare(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Run a PREPARE action on a later stage: decode received hidden states, and compute the layer arguments.

        The hidden states replace the message. The arguments are stored for the layers of this stage.
        ``frame.inputs.last`` becomes True if the pass is the last one."""
        (arrived,) = action.reads
        carried, message = self._held[arrived]
        frame.inputs.last |= carried.last
        self._held[arrived] = carried, self._read(message, carried)
        self._held[context(action.micro_batch)] = self.stage.calls(carried) if carried.rows else ()

    def travel(self, action: Action, frame: Frame[DecodeInput]) -> None:
        """Run an EXCHANGE action: send or receive one message of hidden states or drawn tokens.

        A sent message is dropped from this rank. A received one is stored, hidden states together with their pass. On
        CUDA, first wait until at most ``TRAVELLING`` - 1 earlier exchanges are still running."""
        on_cuda, (transfer,) = self.chain.device.type == "cuda", action.transfers
        buffer = transfer.buffer
        if len(self._under_way) == TRAVELLING:
            self._under_way.popleft().synchronize()
        if transfer.send:
            message = self._message(self._held.pop(buffer)).to(self.chain.device)
            whole = frame.transport.early_transfers is not None or buffer.kind is Kind.IDS
            for part in (message,) if whole else message.tensor_split((self._beginning,)):
                if part.numel():
                    frame.transport.exchange(action, {buffer: part})
        else:
            self._held[buffer], message = self._receive(action, buffer, frame)
            if on_cuda:  # keep the memory until the other lane has read it
                message.record_stream(self.stream)
        if on_cuda:
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
        self._drawn_bytes[group] = drawn_bytes(fed.rows)
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
        header, tokens = _as_tensor(header_of(carried)), _tokens(carried)
        if tuple(hidden.shape) != (1, tokens, self.chain.width) or hidden.dtype != self.chain.dtype:
            expected = f"hidden states (1, {tokens}, {self.chain.width}) in {self.chain.dtype} where a stage ends"
            raise UserError("model", self.chain.name, f"{expected}, not {tuple(hidden.shape)} in {hidden.dtype}")
        if hidden.device.type == "cuda":  # keep the memory of COMPUTE's tensor until this stream has read it
            hidden.record_stream(torch.cuda.current_stream())
        end = len(header) + self._hidden_bytes(tokens)
        message = torch.empty(max(end, self._beginning), dtype=torch.uint8, device=hidden.device)
        message[: len(header)].copy_(header)
        if self.compression:
            encode(hidden.flatten(), self.compression, message[len(header) : end])
        else:
            message[len(header) : end].copy_(hidden.contiguous().view(torch.uint8).flatten())
        return message

    def _receive(self, action: Action, buffer: Buffer, frame: Frame[DecodeInput]) -> tuple[Any, Tensor]:
        """Receive the message of an EXCHANGE action.

        With NCCL, the issuing thread waits for the beginning of a message with hidden states.

        Returns:
            The value of ``buffer``: (pass, message) for hidden states, else the message. Then the message.
        """
        early, size = frame.transport.early_transfers is not None, self._beginning
        first = size if buffer.kind is Kind.INPUT else self._drawn_bytes.get(buffer.at[0], 0)
        into = {} if early else {buffer: torch.empty(first, dtype=torch.uint8, device=self.chain.device)}
        message = frame.transport.exchange(action, into)[buffer]
        if buffer.kind is Kind.IDS:
            return message, message
        header = _as_bytes(message[:size])
        _, _, header_size, tokens = _HEAD.unpack_from(header)
        if not early and (rest := header_size + self._hidden_bytes(tokens) - size) > 0:
            message = torch.nn.functional.pad(message, (0, rest))
            frame.transport.exchange(action, {buffer: message[size:]})
        if header_size > size:
            header = _as_bytes(message[:header_size])
        return (read_header(header, buffer.at[0]), message), message

    def _read(self, message: Tensor, carried: Pass) -> Tensor:
        """Decode the hidden states, [1, tokens, width], in the message of a pass."""
        begin, tokens = header_bytes(carried.rows), _tokens(carried)
        part = message[begin : begin + self._hidden_bytes(tokens)]
        if not self.compression:
            return part.view(self.chain.dtype).view(1, tokens, self.chain.width)
        hidden = self._hidden(tokens)
        decode(part, self.compression, hidden.view(-1))
        return hidden

    def _hidden(self, tokens: int) -> Tensor:
        """Return an uninitialised tensor for the hidden states of ``tokens`` tokens."""
        return torch.empty(1, tokens, self.chain.width, dtype=self.chain.dtype, device=self.chain.device)

    def _hidden_bytes(self, tokens: int) -> int:
        """Return the bytes of the hidden states of ``tokens`` tokens in a message."""
        numbers = tokens * self.chain.width
        return compressed_bytes(numbers) if self.compression else numbers * self.chain.dtype.itemsize


def _tokens(pass_: Pass) -> int:
    """Return the number of tokens of all rows of a pass."""
    return sum(len(row.tokens) for row in pass_.rows)


def _as_tensor(message: bytes) -> Tensor:
    """Copy bytes to a uint8 tensor on the CPU."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _as_bytes(message: Tensor) -> bytes:
    """Copy a uint8 tensor to bytes; waits for its device."""
    return message.cpu().numpy().tobytes()
