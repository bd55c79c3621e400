"""One optimizer's face for the optimizers of all units: the parameter groups that learning-rate schedulers change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tawpipe.errors import UserError
from tawpipe.runtime.homes.storage import PlaceOfPiece


class PipelineOptimizer(Optimizer):
    """The parameter groups of a pipeline, alike on all ranks, for ``torch.optim.lr_scheduler``.

    Groups with the same options are one, whichever unit they are of. What is changed in a group, ``lr`` above all,
    holds from the next ``Pipeline.step`` on. That makes the updates: ``step`` and ``zero_grad`` here do nothing.
    Parameters are empty stand-ins with the names of the real ones (``tawpipe.piece_of(p).name``). ``state_dict`` has
    the groups alone, as JSON values where the options are.
    """

    def __init__(self, options: Mapping[str, Sequence[Any]]) -> None:
        """``options``: of every parameter's group, by the parameter's name, after its optimizer's class."""
        groups: list[tuple[Sequence[Any], dict[str, Any]]] = []
        self.group_of: dict[str, int] = {}
        for name, said in options.items():
            known = [at for at, (other, _) in enumerate(groups) if other == said]
            if not known:
                known = [len(groups)]
                groups.append((said, {**said[1], "params": []}))
            self.group_of[name] = known[0]
            groups[known[0]][1]["params"].append(PlaceOfPiece(name, (), 0).mark(torch.empty(0, device="cpu")))
        super().__init__([group for _, group in groups], {})
        self.defaults = dict(groups[0][0][1])  # by which schedulers see what it has
        self._begun = [dict(group) for group in self.param_groups]
        self._changed = [{"lr"} for _ in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_begun"):
            raise UserError("optimizer", "another parameter group", "the groups that the factory has made")
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing: ``Pipeline.step`` has updated the weights."""

    def chosen(self) -> tuple[dict[str, Any], ...]:
        """Of every group the learning rate, and the other options that differ from those of the beginning or once did:
        who was told of a change is told when it is taken back.
        """
        for group, begun, changed in zip(self.param_groups, self._begun, self._changed, strict=True):
            changed |= {key for key, value in group.items() if key in begun.keys() - {"params"} and value != begun[key]}
        return tuple(
            {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key in changed
            }
            for group, changed in zip(self.param_groups, self._changed, strict=True)
        )
