"""One optimizer object that stands for the optimizers of all units: parameter groups for learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tawpipe.errors import UserError
from tawpipe.runtime.homes.storage import PlaceOfPiece


class PipelineOptimizer(Optimizer):
    """Parameter groups of a pipeline, equal on all ranks, for ``torch.optim.lr_scheduler``.

    Parameters of all units whose options are equal form one group. A changed option, usually ``lr``, applies from the
    next ``Pipeline.step``. That call makes the updates: ``step`` and ``zero_grad`` here have no effect. Parameters are
    empty stand-ins that carry the names of the real ones (``tawpipe.piece_of(p).name``). ``state_dict`` holds only the
    groups, as JSON values where the options are JSON values.
    """

    def __init__(self, options: Mapping[str, Sequence[Any]]) -> None:
        """Build the groups.

        Args:
            options: Parameter name -> the class of its optimizer, followed by the options of its group.
        """
        groups: list[tuple[Sequence[Any], dict[str, Any]]] = []
        self.group_of: dict[str, int] = {}
        for name, group_options in options.items():
            known = [at for at, (other, _) in enumerate(groups) if other == group_options]
            if not known:
                known = [len(groups)]
                groups.append((group_options, {**group_options[1], "params": []}))
            self.group_of[name] = known[0]
            groups[known[0]][1]["params"].append(PlaceOfPiece(name, (), 0).mark(torch.empty(0, device="cpu")))
        super().__init__([group for _, group in groups], {})
        self.defaults = dict(groups[0][0][1])  # schedulers read here which options exist
        self._begun = [dict(group) for group in self.param_groups]
        self._changed = [{"lr"} for _ in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_begun"):
            raise UserError("optimizer", "another parameter group", "the groups that the factory has made")
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: ``Pipeline.step`` updates the weights."""

    def chosen(self) -> tuple[dict[str, Any], ...]:
        """Return for every group its learning rate and the other options that were ever changed.

        An option that was changed and then restored is still listed, so that the optimizers receive the restored value.
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
