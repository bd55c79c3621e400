"""Choice of models and settings by memory, link and time, and their predictions, on rank 0 before any measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from transformers import LlamaConfig

from tawpipe.errors import UserError
from tawpipe.model.flops import chain_flops
from tawpipe.plan.cost.measure import Asked, request_of
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Machine
from tawpipe.prove.models import llama, on_meta
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings

OURS = "tawpipe-spread", "tawpipe-step", "1f1b"
THEIRS: dict[str, dict[str, Any]] = {"FSDP2": {}, "FSDP2, HSDP": {"mesh": "hsdp"}, "FSDP2, kept": {"keep": True}}
"""Rows of FSDP2: flat, as a 2-D mesh, and with weights kept after the forward pass."""
FILE = "your loop"
"""Name of the row of ``--rival``."""
MODELS = {
    "cpu": ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8)),
    "cuda": ((512, 8), (1024, 16), (2048, 16), (3072, 28), (4096, 32), (5120, 40), (8192, 40)),
}
"""Hidden size and layers of the models, from small to large."""
SIZES = {"cpu": (16, 1000, 64), "cuda": (128, 32_000, 4096)}
"""Size of a head, vocabulary, and tokens of a row."""
ROWS = 4
"""Rows of each device in a step."""
LOSS_TOKENS = 2048
LIMIT_S = 600.0
"""Seconds of the whole check."""
SHARES = {"small": 0.2, "large": 0.5}
"""Share of ``LIMIT_S`` that the predicted rows of a model may take."""
USABLE = 0.7
"""Share of a device's memory for which a model is chosen."""
STEPS = {"small": (2, 5, 1), "large": (1, 3, 2)}
"""Steps before the timed ones, timed steps, and passes over all rows. Every pass builds its sides."""
BUILD_S = 1.0
"""Seconds to build a side, beside the transfer of its initial values."""
Values = dict[str, Any]


@dataclass(frozen=True)
class Forecast:
    """Predictions of the rows of one model.

    Args:
        request: the request of the planner, with a measured profile.
        gloo: FSDP2 runs on gloo, which does not overlap its transfers with computing and reduces by all-reduce.
    """

    request: PlanRequest
    gloo: bool

    @property
    def rate(self) -> float:
        """Bytes per second of the link that limits: of a node, or of a device inside the only node."""
        machine = self.request.machine
        return min(self.request.link_rates) if len(machine.nodes) > 1 else machine.inside.bytes_per_s

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(unit.numel for unit in self.request.model.units)

    @property
    def build_s(self) -> float:
        """Seconds to build a side: initial values pass the link once, in fp32."""
        return BUILD_S + 4 * self.elements / self.rate

    def best(self, name: str, side: str) -> Values:
        """Return the row of the fastest recomputation and micro-batch that fit, or a row with ``left_out``."""
        ways = [self._way(name, side, *how) for how in product(("none", "full"), (ROWS, 1))]
        good = [way for way in ways if "left_out" not in way]
        return min(good, key=lambda way: way["predicted"]["seconds"]) if good else ways[-1]

    def _way(self, name: str, side: str, recompute: str, micro_batch: int) -> Values:
        """Return settings and prediction of a row, or the reason why it cannot run as ``left_out``.

        FSDP2's memory is that of our strategy which places weights in the same way. With gloo its transfers and
        computing follow each other, else the longer of both counts.
        """
        theirs = THEIRS.get(name, {})
        strategy = {"ours": name}.get(side, "hsdp" if "mesh" in theirs else "flat")
        settings = {"strategy": strategy, "recompute": recompute, "micro_batches_per_visit": ROWS // micro_batch}
        request, row = self.request.with_micro_batch(micro_batch), {"name": name, "side": side}
        try:
            prediction = predict(request, request.step(ScheduleSettings(**settings, loss_chunk_tokens=LOSS_TOKENS)))
        except UserError as error:
            return row | {"left_out": error.expected}
        seconds, moved, held = prediction.step_seconds, prediction.link_bytes, prediction.peak_bytes
        if side != "ours":
            keep, topology, rounds = theirs.get("keep", False), request.topology, ROWS // micro_batch
            weights, settings = self.elements * request.widths.weight, theirs
            moved = weights * (1 if keep else 2 * rounds) + 4 * self.elements * (1 + self.gloo)
            moved *= 1 - 1 / topology.world_size
            if "mesh" in theirs:  # an all-reduce between nodes; gathers stay inside
                moved = 8 * self.elements * (1 - 1 / topology.num_nodes)
            both = self.compute_s(recompute, micro_batch), moved / self.rate
            seconds = sum(both) if self.gloo else max(both)
            held += weights * keep + 4 * self.elements * (rounds > 1)
            moved *= topology.num_nodes > 1
        if held > request.memory_bytes:
            return row | {"left_out": f"needs {held / 2**30:.1f} of {request.memory_bytes / 2**30:.1f} GiB"}
        tensors = round((held - prediction.needs.parts["system"]) / 2**30, 3)
        predicted = {"seconds": seconds, "bytes": round(moved), "gib": tensors}
        ran = {"recompute": recompute, "micro_batch": micro_batch, "settings": settings, "predicted": predicted}
        return row | ran

    def compute_s(self, recompute: str, micro_batch: int) -> float:
        """Return the seconds in which one device computes its rows of a step."""
        request = self.request.with_micro_batch(micro_batch)
        step = request.step(ScheduleSettings(strategy="flat", recompute=recompute, loss_chunk_tokens=LOSS_TOKENS))
        return sum(request.block_seconds(step)) * ROWS / micro_batch

    def facts(self, rows: list[Values]) -> Values:
        """Return the model's limit: one device's computing, or the least bytes of all rows at the rate of the link."""
        compute = min(self.compute_s("none", micro_batch) for micro_batch in (ROWS, 1))
        moved = min((row["predicted"]["bytes"] for row in rows if row["predicted"]), default=0)
        tokens = {"length": (length := self.request.sequence_length), "tokens": self.request.global_batch * length}
        limits = {"compute_s": compute, "least_bytes": moved, "limit_s": max(compute, moved / self.rate)}
        return {"parameters": self.elements, **tokens, **limits, "build_s": self.build_s}


def total_s(name: str, seconds: list[float], build_s: float) -> float:
    """Return the seconds of all steps and builds of rows whose steps take ``seconds``."""
    warm, timed, passes = STEPS[name]
    return passes * sum(build_s + (warm + timed) * each for each in seconds)


def config_of(device: torch.device, shape: tuple[int, int]) -> LlamaConfig:
    """Return the configuration of an entry of ``MODELS``."""
    head, vocabulary, _ = SIZES[device.type]
    return llama(hidden=shape[0], layers=shape[1], heads=shape[0] // head, vocabulary=vocabulary)


def forecast(world: World, machine: Machine, dtype: torch.dtype, *, file: bool) -> Values:
    """Choose the small and the large model and predict all rows; returns plain data. Call on rank 0 only.

    The largest model is taken whose rows should end in their share of the time, and whose sharded state fits. If only
    one model does, the large one is left out.
    """
    shapes, gloo, length = MODELS[world.device.type], world.device.type == "cpu", SIZES[world.device.type][2]
    names = [*((name, "ours") for name in OURS), *((name, "fsdp2") for name in THEIRS)]
    asked = Asked(length, ROWS * world.size, dtype=dtype, profile="measure")

    @cache
    def predicted(shape: tuple[int, int]) -> Forecast:
        chain = on_meta(config_of(world.device, shape))
        return Forecast(request_of(chain, machine, asked, here=world.device), gloo)

    base = predicted(shapes[min(1, len(shapes) - 1)])
    per_second = base.request.flops / world.size / base.compute_s("none", 1)

    def fits(name: str, shape: tuple[int, int]) -> bool:
        """Return True for a model whose rows should end in time, by a quick estimate of the slowest one."""
        chain, count = on_meta(config_of(world.device, shape)), len(names) + file
        elements = sum(unit.numel for unit in chain.units)
        moved = elements * (2 * dtype.itemsize + 4 * (1 + gloo)) * (1 - 1 / world.size)
        both = (chain_flops(chain, [length]) or 0.0) * ROWS / per_second, moved / base.rate
        seconds = total_s(name, [sum(both)] * count, BUILD_S + 4 * elements / base.rate)
        held = elements * (16 / world.size + dtype.itemsize) * (count if name == "small" else 1)
        return seconds < SHARES[name] * LIMIT_S and held < USABLE * base.request.memory_bytes

    small = max((n for n, shape in enumerate(shapes[:-1]) if fits("small", shape)), default=0)
    large = max((n for n, shape in enumerate(shapes) if n > small and fits("large", shape)), default=-1)
    chosen = {"small": small} | ({"large": large} if large > 0 else {})
    left_out = {} if large > 0 else {"large": "no larger model would end in time and fit"}
    result: Values = {"models": {}, "rows": [], "left_out": left_out, "links": dict(_links(machine))}
    for name, number in chosen.items():
        of_model, (hidden, layers) = predicted(shapes[number]), shapes[number]
        every = [of_model.best(*pair) for pair in names]
        left_out |= {f"{name}: {row['name']}": row["left_out"] for row in every if "left_out" in row}
        rows = [row for row in every if "left_out" not in row]
        seconds = [row["predicted"]["seconds"] for row in rows]
        if file and rows:
            rows.append({"name": FILE, "side": "file", "recompute": "", "micro_batch": 0, "predicted": None})
            seconds.append(max(seconds))
        facts = of_model.facts(rows) | {"total_s": total_s(name, seconds, of_model.build_s)}
        result["models"][name] = {"hidden": hidden, "layers": layers} | facts
        result["rows"] += [{"model": name} | row for row in rows]
    return result


def _links(machine: Machine) -> Iterator[tuple[str, Values]]:
    """Yield (name, rate and latency) of the links that were measured."""
    for name, link in (("inside", machine.inside), ("between", machine.between)):
        if math.isfinite(link.bytes_per_s):
            yield name, {"gbit_s": link.bytes_per_s * 8 / 1e9, "latency_us": link.latency_s * 1e6}
