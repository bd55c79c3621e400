"""Text that is almost right, given to everything that reads text: settings, topologies, plans, recordings, checkpoints.

Sound examples are damaged at random: words exchanged, numbers out of range, parts repeated, left out or cut. Whatever
comes out must be read, or refused with an error that names the setting.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import tawpipe_lab
from tawpipe.checkpoint.format import damage as damage_of
from tawpipe.checkpoint.format import read_manifest, sealed
from tawpipe.checkpoint.names import MARKER
from tawpipe.checkpoint.resume import read_run
from tawpipe.environment import LaunchEnvironment
from tawpipe.errors import UserError
from tawpipe.plan.cost.measure import machine_of
from tawpipe.plan.machine.machine import Device, machine_from
from tawpipe.plan.search.plan_file import load_plan, planned_settings, request_from
from tawpipe.report.bars import executed_bars
from tawpipe.runtime.watch.faults import parse_faults
from tawpipe.schedule.actions import Action
from tawpipe.train.settings.checks import validate
from tawpipe.train.settings.config import TrainConfig, load_config, train_options
from tawpipe_lab.cluster.rates import parse_rates
from tawpipe_lab.suite import load_suite

_FOLDER = tempfile.TemporaryDirectory(prefix="tawpipe-hunt-")
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\0",
    "é" * 9,
    [],
    {},
    [[]],
    10**30,
)
"""Put in the place of something else."""
ACTIONS = (
    "INTER_W EXCHANGE ~int8 | SEND>3:u3:home.w.3 RECV<2:u4:S0.1",
    "COMPUTE BACKWARD b2 m3 | W0.1 x.3.2 dx.3.3 G0.0 -> G0.0 dx.3.2 free x.3.2 dx.3.3",
    "REDUCE COLLECTIVE reduce @node u1 r0 | G0.1 -> A0.0",
)


def damage(value: Any, random_: random.Random, depth: int = 0) -> Any:
    """A nested value with something wrong in it."""
    if random_.random() < 0.15:
        return random_.choice(ODD)
    if isinstance(value, dict) and value:
        key = random_.choice(list(value))
        changed = dict(value)
        what = random_.random()
        if what < 0.15:
            del changed[key]
        elif what < 0.3:
            changed[random_.choice(["x", "", 7, None])] = changed.pop(key)
        else:
            changed[key] = damage(value[key], random_, depth + 1)
        return changed
    if isinstance(value, list) and value:
        at = random_.randrange(len(value))
        what = random_.random()
        if what < 0.2:
            return value[:at] + value[at + 1 :]
        if what < 0.4:
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], damage(value[at], random_, depth + 1), *value[at + 1 :]]
    if isinstance(value, str) and value:
        return garble(value, random_)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return random_.choice([value + 1, -value, value * 10**9, str(value), value / 3])
    return random_.choice(ODD)


def garble(text: str, random_: random.Random) -> str:
    """Text with some characters exchanged, left out, repeated or cut off."""
    for _ in range(random_.randint(1, 4)):
        at, what = random_.randrange(len(text) + 1), random_.random()
        if what < 0.3:
            text = text[:at] + random_.choice("0123456789abz:,.=-{}[]'\"\n\t#&*!|>%@ ") + text[at:]
        elif what < 0.6:
            text = text[:at] + text[at + random_.randint(1, 3) :]
        elif what < 0.8:
            text = text[:at] + text[at : at + 9] + text[at:]
        else:
            text = text[:at]
    return text


def targets(folder: Path) -> dict[str, Callable[[random.Random], Any]]:
    """Name to a function that reads something damaged."""
    plan_text = _plan_text()
    plan = yaml.safe_load(plan_text)
    record = {
        "format": 2,
        "parameters": {"w": [2, 3]},
        "tensors": {"model.w": {"numel": 6, "chunks": [[0, 6, 0]]}},
        "step": 1,
        "files": [{"bytes": 10, "sha256": "00"}],
        "run": {"step": 1, "samples": 2, "seed": 0, "fingerprint": "documents:1"},
    }
    faults = "rank=2,step=7,at=push:3,kind=kill;rank=0,step=1,at=forward:2,kind=slow,seconds=2"
    trace = {
        "format": 1,
        "rank": 0,
        "node": 0,
        "step": 7,
        "spans": [["COMPUTE FORWARD b1 m0 | W0.0 -> x.0.2", 0.0, 1.0]],
    }
    suite = yaml.safe_load((Path(tawpipe_lab.__file__).parent / "suites/smoke.yaml").read_text(encoding="utf-8"))
    settings = yaml.safe_load(train_options().to_yaml(TrainConfig(data=["README.md"], output=str(folder / "out"))))
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}

    def written(name: str, text: str) -> Path:
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    def either(value: Any, text: Callable[[Any], str], random_: random.Random) -> str:
        return garble(text(value), random_) if random_.random() < 0.5 else text(damage(value, random_))

    def dump(value: Any) -> str:
        return yaml.safe_dump(value, sort_keys=False)

    def read_settings(random_: random.Random) -> None:
        validate(load_config(["--config", str(written("config.yaml", either(settings, dump, random_)))]), environ={})

    def read_plan(random_: random.Random) -> None:
        found = load_plan(written("plan.yaml", either(plan, dump, random_)))
        if isinstance(found.get("clock"), dict):
            request = request_from(found["clock"], where="plan.yaml")
            request.step(planned_settings(found["schedule"], request.settings))

    def read_checkpoint(random_: random.Random) -> None:
        # half of them with a checksum that is right, so that what is in them is looked at
        sealing = (
            (lambda value: json.dumps(sealed(json.loads(json.dumps(value))) if isinstance(value, dict) else value)),
            json.dumps,
        )
        path = written(f"step/{MARKER}", either(record, random_.choice(sealing), random_)).parent
        read_run(path)
        found = read_manifest(path)
        damage_of(path, found, range(len(found["files"])))

    def read_trace(random_: random.Random) -> None:
        executed_bars(written("trace/rank-00000.json", either(trace, json.dumps, random_)).parent)

    def read_action(random_: random.Random) -> None:
        with contextlib.suppress(ValueError):  # what a reader of recordings expects of it
            Action.parse(garble(random_.choice(ACTIONS), random_))

    return {
        "settings of train (YAML)": read_settings,
        "plan.yaml": read_plan,
        "topology file": lambda random_: machine_from(damage(plan["clock"]["machine"], random_)),
        "topology in short": lambda random_: machine_of(garble("3x8@10gbit", random_), device=Device()),
        "checkpoint record": read_checkpoint,
        "recorded step": read_trace,
        "action": read_action,
        "suite of the lab": lambda random_: load_suite(str(written("suite.yaml", either(suite, dump, random_)))),
        "rates of links": lambda random_: parse_rates(garble("400mbit,200mbit", random_), nodes=2),
        "faults": lambda random_: parse_faults(garble(faults, random_)),
        "launcher's variables": lambda random_: LaunchEnvironment.read(
            {name: garble(value, random_) if random_.random() < 0.5 else value for name, value in environment.items()}
        ),
    }


def _plan_text() -> str:
    """A plan of a small model."""
    import torch

    from tawpipe.model.chain import Chain
    from tawpipe.model.files.build import build_model
    from tawpipe.plan.cost.measure import Asked, request_of
    from tawpipe.plan.search.plan import Plan
    from tawpipe.plan.search.search import search

    machine = machine_of("2x2@1gbit", device=Device("CPU", 0, 1e11))
    chain = Chain(build_model("tiny", vocab_size=500, max_positions=64).model)
    request = request_of(chain, machine, Asked(64, 8, dtype=torch.float32, profile="estimate"))
    return Plan.of(request, search(request)).text()


@cache
def _readers() -> dict[str, Callable[[random.Random], Any]]:
    return targets(Path(_FOLDER.name))


def draw(draw: random.Random) -> dict[str, Any]:
    """A reader, and what damages its text."""
    return {"reader": draw.choice(list(_readers())), "damage": draw.randrange(2**32)}


def check(case: dict[str, Any]) -> str:
    """Nothing: whatever is read, is.

    Raises:
        UserError: the text is refused.
    """
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            _readers()[case["reader"]](random.Random(case["damage"]))
        except SystemExit as stop:
            if stop.code != 2:
                raise
            raise UserError("the command", said.getvalue(), "what its help says") from None
    return ""
