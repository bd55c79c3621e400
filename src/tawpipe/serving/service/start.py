"""One process of the service: rank 0 answers requests, the other ranks compute their stage until rank 0 ends."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tawpipe.data.tokenizer import check_vocabulary, load_tokenizer, stops_of
from tawpipe.environment import LaunchEnvironment
from tawpipe.model.files.build import longest_allowed, text_config_of
from tawpipe.model.files.carried import GENERATION, read_settings
from tawpipe.options import Open
from tawpipe.runtime.world import World, connect
from tawpipe.serving.engine import Engine, StagesEngine, load_engine
from tawpipe.serving.passes import SlotLayout
from tawpipe.serving.requests import Slots
from tawpipe.serving.service.api import Service
from tawpipe.serving.service.engine import bound_socket, ignore_signals, run_service
from tawpipe.serving.service.fields import with_defaults
from tawpipe.serving.service.settings import ServeConfig, read_key
from tawpipe.serving.service.text import Prompts


def serve(config: ServeConfig, folder: Path) -> None:
    """Serve the model in a folder until a signal ends the service. Call in every process of the service.

    Rank 0 answers HTTP requests. The other ranks ignore signals, and compute their stage until rank 0 ends.

    Raises:
        UserError: a setting or the model cannot work. Raised before weights are loaded.
    """
    launched = LaunchEnvironment.read(os.environ)
    first = launched is None or launched.rank == 0
    listening = bound_socket(config.host, config.port) if first else None  # check the address before loading weights
    tokenizer = load_tokenizer(str(folder), "--model")
    prompts = Prompts(tokenizer, config.chat_template)
    text_config = text_config_of(str(folder), config.trust_remote_code)
    check_vocabulary(tokenizer, text_config.vocab_size, "--model")
    world = connect(device=config.device)
    engine = _engine(config, folder, world, longest_allowed(text_config))
    if listening is None:
        ignore_signals()
        engine.run(None)
    else:
        slots = Slots(engine.slot_layout, waiting=config.max_waiting, idle_s=config.idle_s)
        service = _service(config, folder, slots, tokenizer, prompts, text_config.vocab_size)
        host, port = listening.getsockname()[:2]
        layout = slots.slot_layout
        ready = (
            f"{service.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: "
            f"{layout.groups * layout.slots} slots of {layout.context} tokens on {world.nodes}, "
            f"{world.device.type}{'' if prompts.template else '; no chats without --chat-template'}; ctrl-C ends"
        )
        run_service(engine.run, slots, service.application(read_key(config)), listening, config, ready)
    engine.close()


def _engine(config: ServeConfig, folder: Path, world: World, longest: int) -> Engine | StagesEngine:
    """Load the model in ``folder`` and return the engine of this process. Call in every process.

    Args:
        config: settings of the service.
        folder: folder of the model.
        world: the processes.
        longest: maximum context of the model; the default of the setting ``context`` is limited to it.
    """
    context = min(int(config.context), longest) if isinstance(config.context, Open) else config.context
    groups = world.size if isinstance(config.groups, Open) else config.groups
    return load_engine(
        folder,
        SlotLayout(groups, config.slots, context, min(config.chunk, context)),
        world,
        dtype=config.dtype,
        weights=config.weights,
        compression=config.compression.replace("none", ""),
        timeout=timedelta(seconds=config.timeout_s),
        trust_remote_code=config.trust_remote_code,
    )


def _service(
    config: ServeConfig, folder: Path, slots: Slots, tokenizer: Any, prompts: Prompts, vocabulary: int
) -> Service:
    """Build the HTTP routes, with the stop tokens and sampling defaults of the model's generation config."""
    generation = SimpleNamespace(**read_settings(folder, GENERATION))
    name = config.name or Path(config.model).expanduser().resolve().name
    stops = {*stops_of(SimpleNamespace(generation_config=generation), tokenizer), prompts.end_of_text} - {None}
    return Service(config, slots, tokenizer, prompts, name, stops, with_defaults(generation), vocabulary)
