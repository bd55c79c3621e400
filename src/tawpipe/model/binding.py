"""Binds a model's parameters to buffers, unit by unit, so that a device holds only the weights of units on a visit.

Outside its visit a parameter is a placeholder of its own shape with one element of storage, which is NaN. Code that
reads it makes the loss NaN. Autograd's gradients go into a buffer at once, and no parameter keeps one. Calls come from
one thread. Only the gradient hooks may run on autograd's own threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.units import ALIGNED_ELEMENTS, Unit

NEED_WEIGHTS = (
    *("forward", "generate", "state_dict", "load_state_dict", "save_pretrained", "push_to_hub"),
    *("merge_and_unload", "merge_adapter", "unload"),  # methods of peft
)


@dataclass(eq=False)
class _Collection:
    """Buffer for the gradients of one unit, and the parameters whose gradient has arrived.

    Args:
        flat: the buffer, in the unit's flat layout.
        accumulate: True to add to the content of ``flat``, False to overwrite it.
        target: a narrower buffer that receives the sum at the end, and True if the sum is added to its content.
        arrived: indices of the parameters whose gradient has arrived.
    """

    flat: Tensor
    accumulate: bool
    target: tuple[Tensor, bool] | None = None
    arrived: set[int] = field(default_factory=set)


class _Gone:
    """Replacement for a model's method that needs its weights.

    Calling it raises UserError."""

    def __init__(self, model: str, method: str) -> None:
        self._model, self._method = model, method

    def __call__(self, *_: object, **__: object) -> Any:
        raise UserError(
            f"{self._model}.{self._method}",
            "a model whose weights a Pipeline has taken",
            "use pipeline.step, evaluate, parameter(name), save and load; pipeline.export(folder) writes a folder for "
            "AutoModelForCausalLM.from_pretrained",
        )


def refuse_emptied(model: nn.Module) -> None:
    """Raise UserError if another pipeline has taken the model's weights."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, _Gone):
        forward()


def refuse_use(*models: nn.Module) -> None:
    """Replace methods of the models that need weights by ones that raise UserError."""
    for model in {id(emptied): emptied for emptied in models}.values():
        for method in NEED_WEIGHTS:
            if hasattr(model, method):
                model.__dict__[method] = _Gone(type(model).__name__, method)


class UnitBinding:
    """Binds the parameters of a model's units to a buffer for the time of a visit.

    Args:
        units: all units of the model.
    """

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self.units = units
        self.device, self.dtype = torch.device("meta"), torch.float32
        self._parameters: tuple[tuple[nn.Parameter, ...], ...] = ()
        self._placeholders: tuple[tuple[Tensor, ...], ...] = ()
        self._place_of: dict[nn.Parameter, tuple[int, int]] = {}
        """Parameter -> (index of its unit, index of its slot in the unit)."""
        self._collections: dict[int, _Collection] = {}
        self._span_of: dict[int, tuple[int, int]] = {}
        self._unpacked: dict[int, Tensor] = {}
        """Packed unit -> its dequantised numbers, if they are in the buffer. Frozen units change only by loading (see
        ``forget``)."""
        self._unpack_buffer = torch.empty(0)

    @property
    def unpacked_elements(self) -> int:
        """Elements of the buffer for the dequantised numbers of all packed units of any one block."""
        return max((end for _, end in self._spans().values()), default=0)

    def _spans(self) -> dict[int, tuple[int, int]]:
        """Return (begin, end) of every packed unit in the buffer for dequantised numbers.

        Units of the same block do not overlap. Others may."""
        spans: dict[int, tuple[int, int]] = {}
        for unit in self.units:
            if unit.packing is not None:
                beside = [other for other in spans if set(self.units[other].blocks) & set(unit.blocks)]
                begin = max((spans[other][1] for other in beside), default=0)
                spans[unit.index] = begin, begin + -(-unit.numel // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        return spans

    def empty(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Replace every parameter of ``model`` by a placeholder on ``device``, and drop its values.

        This also allocates the buffer for dequantised numbers, and registers gradient hooks on trainable parameters."""
        self.device, self.dtype = device, dtype
        nan = torch.full((1,), float("nan"), dtype=dtype, device=self.device)
        fresh: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, old in module._parameters.items():
                if old is None:
                    continue
                if old not in fresh:
                    fresh[old] = nn.Parameter(nan.expand(old.shape), requires_grad=old.requires_grad)
                module._parameters[name] = fresh[old]

        by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._parameters = tuple(tuple(by_name[slot.name] for slot in unit.slots) for unit in self.units)
        self._placeholders = tuple(tuple(p.data for p in parameters) for parameters in self._parameters)
        self._place_of = {
            p: (unit, slot) for unit, parameters in enumerate(self._parameters) for slot, p in enumerate(parameters)
        }
        self._collections, self._unpacked = {}, {}
        self._unpack_buffer = torch.empty(self.unpacked_elements, dtype=dtype, device=device)
        self._span_of = self._spans()
        for unit in self.units:
            if unit.trainable:
                for index, parameter in enumerate(self._parameters[unit.index]):
                    parameter.register_post_accumulate_grad_hook(self._collector(unit.index, index))

    def check_frozen(self) -> None:
        """Raise UserError if ``requires_grad`` of a parameter has changed since the chain was made."""
        for unit, parameters in zip(self.units, self._parameters, strict=True):
            for slot, parameter in zip(unit.slots, parameters, strict=True):
                if parameter.requires_grad != unit.trainable:
                    now = "trained" if parameter.requires_grad else "frozen"
                    raise UserError(
                        f"{slot.name}.requires_grad",
                        parameter.requires_grad,
                        f"{now} before the Pipeline is made, not after",
                    )

    def bind(self, unit: int, flat: Tensor) -> Tensor:
        """Make the parameters of ``unit`` views of ``flat`` until ``release``; return the tensor they are views of.

        A packed unit is dequantised first, and its parameters are views of the dequantised numbers.

        Args:
            unit: index of the unit.
            flat: buffer with the unit's weights or bytes, of the device and dtype of ``empty``, at least as long as the
                unit's spec says.
        """
        assert flat.dtype == self.dtype and flat.device.type == self.device.type, (flat.dtype, flat.device)
        assert flat.numel() >= self.units[unit].spec.numel
        flat = self._numbers(unit, flat)
        for slot, parameter in zip(self.units[unit].slots, self._parameters[unit], strict=True):
            parameter.data = slot.view(flat)
        return flat

    def hold(self, unit: int, flat: Tensor, *, without: Collection[str] = ()) -> None:
        """Set the values of the unit's parameters until ``release``, from plain numbers that are not packed.

        Args:
            unit: index of the unit.
            flat: flat layout of the unit.
            without: names of parameters that stay placeholders. If there are some, the values of all others are copied,
                so that ``flat`` may be freed. Otherwise the parameters are views of ``flat``.
        """
        shares = not any(slot.name in without for slot in self.units[unit].slots)
        for slot, parameter in zip(self.units[unit].slots, self._parameters[unit], strict=True):
            if slot.name not in without:
                parameter.data = slot.view(flat) if shares else slot.view(flat).clone()

    @torch.no_grad()
    def _numbers(self, unit: int, flat: Tensor) -> Tensor:
        """Return the unit's numbers: ``flat`` itself, or the dequantised numbers of a packed unit.

        Dequantised numbers stay in a buffer until another unit overwrites them, so that all micro-batches of a visit,
        and a backward pass right after it, share one computation."""
        packing = self.units[unit].packing
        if packing is None:
            return flat
        if unit not in self._unpacked:
            begin, end = self._span_of[unit]
            over = [u for u in self._unpacked if self._span_of[u][0] < end and begin < self._span_of[u][1]]
            for other in over:
                del self._unpacked[other]
            packing.unpack(flat, self._unpack_buffer[begin:end])
            self._unpacked[unit] = self._unpack_buffer[begin:end]
        return self._unpacked[unit]

    def forget(self) -> None:
        """Discard all dequantised numbers, because the bytes of packed units have changed."""
        self._unpacked.clear()

    def release(self, unit: int) -> None:
        """End a visit of ``unit``: make its parameters placeholders again, so that they keep no buffer alive."""
        for parameter, placeholder in zip(self._parameters[unit], self._placeholders[unit], strict=True):
            parameter.data = placeholder

    def collect(self, unit: int, flat: Tensor, accumulate: bool, *, in_chunks: bool = False) -> None:
        """Collect gradients of the unit's parameters in ``flat`` until ``finish_collect``, while autograd runs.

        Args:
            unit: index of a trainable unit.
            flat: [numel] or longer. Its dtype may be wider than the dtype of the parameters.
            accumulate: True to add to the content of ``flat``. Otherwise the content is ignored: a parameter's first
                gradient is copied, later ones (from the head's chunks) are added.
            in_chunks: True if every parameter gets many gradients. They are then summed in fp32, in a temporary buffer
                that lives until ``finish_collect`` if ``flat`` is narrower.
        """
        assert self.units[unit].trainable and unit not in self._collections
        assert flat.numel() >= self.units[unit].numel
        wide = torch.promote_types(flat.dtype, torch.float32)
        if in_chunks and flat.dtype != wide:
            self._collections[unit] = _Collection(torch.empty_like(flat, dtype=wide), False, (flat, accumulate))
        else:
            self._collections[unit] = _Collection(flat, accumulate)

    def parameters_of(self, units: Iterable[int]) -> Iterator[nn.Parameter]:
        """Yield all parameters of ``units``."""
        for unit in units:
            yield from self._parameters[unit]

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a view of the parameter's gradient in the buffer of ``collect``, for code that adds to it.

        Autograd does not make the gradient of such code. The view holds the sum collected so far, or zeros. From then
        on the gradient counts as arrived."""
        unit, index = self._place_of[parameter]
        collection, slot = self._collections[unit], self.units[unit].slots[index]
        target = slot.view(collection.flat)
        if not collection.accumulate and index not in collection.arrived:
            target.zero_()
        collection.arrived.add(index)
        return target

    def finish_collect(self, unit: int) -> None:
        """End ``collect`` for ``unit``, and add or copy a temporary fp32 sum into its target.

        Without ``accumulate``, elements that received no gradient are set to zero, padding included."""
        collection = self._collections.pop(unit)
        if not collection.accumulate:
            self._zero_the_rest(unit, collection)
        if collection.target is not None:
            target, add = collection.target
            if add:
                target.add_(collection.flat)
            else:
                target.copy_(collection.flat)

    def _zero_the_rest(self, unit: int, collection: _Collection) -> None:
        """Set the gradients of parameters that received none to zero, and the padding behind the unit."""
        slots = self.units[unit].slots
        if not collection.arrived:
            collection.flat.zero_()
            return
        for index, slot in enumerate(slots):
            if index not in collection.arrived:
                slot.view(collection.flat).zero_()
        collection.flat[self.units[unit].numel :].zero_()

    def _collector(self, unit: int, index: int) -> Callable[[Tensor], None]:
        """Return the gradient hook of one parameter, which moves its gradient into the unit's buffer."""
        slot = self.units[unit].slots[index]

        def take(parameter: Tensor) -> None:
            """Copy or add the gradient of ``parameter`` into the buffer, and set ``parameter.grad`` to None."""
            collection = self._collections.get(unit)
            assert collection is not None, f"a gradient of {slot.name} came while nobody collects it"
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:  # autograd calls the hook without a gradient
                return
            target = slot.view(collection.flat)
            if collection.accumulate or index in collection.arrived:
                target.add_(gradient)
            else:
                target.copy_(gradient)
            collection.arrived.add(index)

        return take
