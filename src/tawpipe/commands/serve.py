"""``tawpipe serve``: answers requests over HTTP, on one process or as one of several with a stage each."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from tawpipe.commands.chat import ADAPTER, CONFIG, model_folder
from tawpipe.environment import LaunchEnvironment, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.launch.gpus import find_gpus
from tawpipe.launch.launcher import in_this_process, launch, local_shape
from tawpipe.options import CommandParser, Open
from tawpipe.options.library import as_option
from tawpipe.serve.settings import OPTIONS, ServeConfig, load, read_key

IMPORTS = ("tawpipe.runtime.engine", "transformers.models.llama.modeling_llama")
"""What every process imports."""
MORE_S = 5.0
"""Seconds that the launcher leaves the processes beyond those of open answers."""


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe serve`` with the words ``argv`` and returns the exit code."""
    config = load(argv)
    try:
        return _run(argv, config)
    except UserError as error:
        if error.setting in {leaf.key for leaf in OPTIONS.leaves.values()}:
            error = UserError(f"--{error.setting.replace('_', '-')}", error.value, error.expected)
        raise OPTIONS.located(as_option(error), argv) from error


def _parser() -> CommandParser:
    return OPTIONS.parser


def _run(argv: Sequence[str], config: ServeConfig) -> int:
    if started_by_local_launcher():
        return _serve(config)
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError("tawpipe", "serve", f"{' and '.join(missing)} installed: {install_hint('serve')}")
    read_key(config)
    _folder(config)
    if LaunchEnvironment.read(os.environ) is not None:
        if config.nproc is not None:
            raise UserError("--nproc", config.nproc, "unset under torchrun, which was told by --nproc-per-node")
        return _serve(config)
    gpus = find_gpus() if config.device != "cpu" else ()
    shape = local_shape(1, config.nproc or len(gpus) or 1, num_gpus=len(gpus))
    if shape.nproc == 1 and not config.max_restarts:
        with in_this_process(gpus=gpus):
            return _serve(config)
    return launch(
        [sys.executable, "-m", "tawpipe", "serve", *argv],
        shape,
        gpus=gpus,
        patience_s=config.drain_s + MORE_S,
        max_restarts=config.max_restarts,
        imports=IMPORTS,
    )


def _folder(config: ServeConfig) -> Path:
    folder = model_folder(Path(config.model).expanduser(), "--model")
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        expected = "a whole model; tawpipe export RUN --merge writes one with the adapter in its weights"
        raise UserError("--model", config.model, expected)
    return folder


def _serve(config: ServeConfig) -> int:
    """One process of the service, under the variables of a launcher."""
    launched = LaunchEnvironment.read(os.environ)
    first = launched is None or launched.rank == 0
    from tawpipe.serve.engine import bound_socket

    listening = bound_socket(config.host, config.port) if first else None
    from transformers import GenerationConfig

    from tawpipe.data.tokenizer import check_vocabulary, load_tokenizer
    from tawpipe.model.build import longest_allowed, text_config_of
    from tawpipe.runtime.engine import load_engine
    from tawpipe.runtime.passes import Room
    from tawpipe.runtime.world import connect
    from tawpipe.serve.api import RequestLimits, Service
    from tawpipe.serve.engine import ignore_signals, run_service
    from tawpipe.serve.fields import with_defaults
    from tawpipe.serve.slots import Slots
    from tawpipe.serve.text import Prompts
    from tawpipe.train.sample import stops_of

    folder = _folder(config)
    tokenizer = load_tokenizer(str(folder), "--model")
    prompts = Prompts(tokenizer, config.chat_template)
    text_config = text_config_of(str(folder), config.trust_remote_code)
    check_vocabulary(tokenizer, text_config.vocab_size, "--model")
    world = connect(device=config.device)
    context = config.context
    if isinstance(context, Open):
        context = min(int(context), longest_allowed(text_config))
    groups = world.size if isinstance(config.groups, Open) else config.groups
    room = Room(groups, config.slots, int(context), min(config.chunk, int(context)))
    engine = load_engine(
        folder,
        room,
        world=world,
        dtype=config.dtype,
        weights=config.weights,
        compression=config.compression.replace("none", ""),
        timeout=timedelta(seconds=config.timeout_s),
        trust_remote_code=config.trust_remote_code,
    )
    if listening is None:
        ignore_signals()
        engine.run(None)
        engine.close()
        return 0
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = None
    stops = {*stops_of(SimpleNamespace(generation_config=generation), tokenizer), prompts.end_of_text} - {None}
    name = config.name or Path(config.model).expanduser().resolve().name
    slots = Slots(room, waiting=config.max_waiting, idle_s=config.idle_s)
    service = Service(
        slots,
        tokenizer,
        prompts,
        name=name,
        stops=sorted(stops),
        defaults=with_defaults(generation),
        limits=RequestLimits(config.max_body_kib * 1024, config.max_tokens, config.request_s),
    )
    host, port = listening.getsockname()[:2]
    most = room.groups * room.slots
    run_service(
        engine,
        slots,
        service.application(key=read_key(config), loopback=config.loopback),
        listening,
        most=most + config.max_waiting,
        drain_s=config.drain_s,
        ready=lambda: print(
            f"{name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: {most} slots of {room.context} "
            f"tokens on {world.nodes}, {world.device.type}; ctrl-C ends",
            flush=True,
        ),
    )
    engine.close()
    return 0
