"""Command ``tawpipe plan --serve``: plan how to serve a number of users on given machines, in stages or not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tawpipe.errors import UserError

if TYPE_CHECKING:
    from tawpipe.commands.plan_words import PlanWords
    from tawpipe.plan.machine.machine import Machine
    from tawpipe.serving.planner import ServeRequest


def serve(request: ServeRequest, *, as_json: bool) -> int:
    """Make the plan for ``request`` and print it, as JSON or as text; return the exit code, 1 if nothing fits."""
    from tawpipe.serving.planner import ServePlan

    plan, machine = ServePlan(request), request.machine
    if as_json:
        print(json.dumps(plan.spelled_out(), indent=2))
    else:
        print(f"{machine.topology}; {request.users} users with {request.context:,} tokens each; {request.source}")
        if machine.world_size > 1:
            print(f"a hop from stage to stage takes {1e3 * request.hand_s:.1f} ms besides the link's, as on CPUs")
        for line in (*plan.table(), "", plan.reason):
            print(line)
    return 0 if plan.chosen else 1


def request_for(words: PlanWords, machine: Machine, *, here: Any, dtype: Any) -> ServeRequest:
    """Build the model, measure its forward passes or estimate their times, and return the request for a serving plan.

    Args:
        words: arguments of the command line.
        machine: machines to plan for.
        here: device of this process.
        dtype: type in which the model computes.

    Raises:
        UserError: the model cannot be served, or the device's speed is not known.
    """
    from tawpipe.model.bits.lowbit import AUTO, EXACT
    from tawpipe.model.chain import Chain
    from tawpipe.model.files.build import PRESETS, build_model
    from tawpipe.model.flops import KNOWN_DEVICES, key_bytes, memory_rate, peak_flops
    from tawpipe.plan.cost.measure import USABLE, device_name, system_of
    from tawpipe.serving.held import WeightBytes, refuse_serving, stored_form
    from tawpipe.serving.pass_costs import estimated_passes, measured_passes
    from tawpipe.serving.planner import HAND_S, ServeRequest

    config, device = words.config, machine.device
    measures = words.profile == "measure" or (words.profile == "auto" and device_name(here) == device.name)
    assert words.users is not None and words.context is not None
    built = build_model(
        config.model,
        vocab_size=words.user_value("vocab_size") if config.model in PRESETS else None,
        max_positions=words.context,
        longest=words.context,
        rope=config.rope,
        trust_remote_code=config.trust_remote_code,
    )
    chain = Chain(built.model)
    refuse_serving(chain, words.context)
    form, kind = words.weights or AUTO, "cpu" if device.name == "CPU" else "cuda"
    if form == AUTO:
        form = stored_form(chain, getattr(built.source(chain, seed=0), "codes", lambda name: None))
    weights = WeightBytes.of(chain, form, dtype, kind)
    sizes, model = chain.config.get_text_config(), chain.spec
    flops = device.flops or peak_flops(device.name, str(dtype).removeprefix("torch."))
    rate, keys = memory_rate(device.name), key_bytes(sizes, dtype)[0]
    if measures:
        with chain.borrowed():
            costs = measured_passes(chain, dtype=dtype, device=here, form=form, weights=weights)
        source = f"measured on {device_name(here)}"
    elif flops and rate:
        costs = estimated_passes(model, flops=flops, memory_rate=rate, weights=weights, key_width=keys)
        source = f"estimated from {device.name}'s {flops / 1e12:.3g} TFLOP/s and {rate / 1e12:.3g} TB/s"
    else:
        known = f"{', '.join(KNOWN_DEVICES)}, in bfloat16 (--dtype), or CPU to measure on this machine's processors"
        raise UserError("--device-name", device.name, known)
    limit = device.memory_bytes * USABLE if words.memory is None else words.memory * 2**30
    return ServeRequest(
        model,
        costs,
        machine,
        words.users,
        words.context,
        sizes.hidden_size * dtype.itemsize,
        keys,
        weight_bytes=weights.held,
        memory_bytes=int(limit),
        system_bytes=system_of(machine, here)[0],
        source=source if form == EXACT else f"{source}; weights in {form}",
        why_not_staged=chain.why_not_staged,
        hand_s=HAND_S,
    )
