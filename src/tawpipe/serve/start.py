"""One process of the service: the first one answers requests, the others compute their stage until it ends."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig

from tawpipe.data.tokenizer import check_vocabulary, load_tokenizer, stops_of
from tawpipe.environment import LaunchEnvironment
from tawpipe.model.build import longest_allowed, text_config_of
from tawpipe.options import Open
from tawpipe.runtime.engine import Engine, StagesEngine, load_engine
from tawpipe.runtime.passes import Room
from tawpipe.runtime.requests import Slots
from tawpipe.runtime.world import World, connect
from tawpipe.serve.api import RequestLimits, Service
from tawpipe.serve.engine import bound_socket, ignore_signals, run_service
from tawpipe.serve.fields import with_defaults
from tawpipe.serve.settings import ServeConfig, read_key
from tawpipe.serve.text import Prompts


def serve(config: ServeConfig, folder: Path) -> None:
    """Serve the model of a folder until a signal ends it; every process of the service calls it.

    Raises:
        UserError: a setting, or a model, that cannot work; before its weights are read.
    """
    launched = LaunchEnvironment.read(os.environ)
    first = launched is None or launched.rank == 0
    listening = bound_socket(config.host, config.port) if first else None  # nobody waits for weights in vain
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
        _answer(config, folder, engine, world, tokenizer, prompts, listening)
    engine.close()


def _engine(config: ServeConfig, folder: Path, world: World, longest: int) -> Engine | StagesEngine:
    context = min(int(config.context), longest) if isinstance(config.context, Open) else config.context
    groups = world.size if isinstance(config.groups, Open) else config.groups
    return load_engine(
        folder,
        Room(groups, config.slots, context, min(config.chunk, context)),
        world=world,
        dtype=config.dtype,
        weights=config.weights,
        compression=config.compression.replace("none", ""),
        timeout=timedelta(seconds=config.timeout_s),
        trust_remote_code=config.trust_remote_code,
    )


def _answer(
    config: ServeConfig,
    folder: Path,
    engine: Engine | StagesEngine,
    world: World,
    tokenizer: Any,
    prompts: Prompts,
    listening: socket.socket,
) -> None:
    """The first process."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none
        generation = None
    stops = stops_of(SimpleNamespace(generation_config=generation), tokenizer)
    name = config.name or Path(config.model).expanduser().resolve().name
    slots = Slots(engine.room, waiting=config.max_waiting, idle_s=config.idle_s)
    service = Service(
        slots,
        tokenizer,
        prompts,
        name=name,
        stops=stops if prompts.end_of_text is None else [*stops, prompts.end_of_text],
        defaults=with_defaults(generation),
        limits=RequestLimits(config.max_body_kib * 1024, config.max_tokens, config.request_s),
    )
    host, port = listening.getsockname()[:2]
    places = engine.room.groups * engine.room.slots
    run_service(
        engine,
        slots,
        service.application(key=read_key(config), loopback=config.loopback),
        listening,
        most=places + config.max_waiting,
        drain_s=config.drain_s,
        ready=lambda: print(
            f"{name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: {places} slots of "
            f"{engine.room.context} tokens on {world.nodes}, {world.device.type}; ctrl-C ends",
            flush=True,
        ),
    )
