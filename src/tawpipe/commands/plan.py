"""Command ``tawpipe plan``: predict the cost of a run under every strategy on given machines, and choose one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tawpipe.commands.plan_serve import request_for, serve
from tawpipe.commands.plan_words import CORPUS, PROBE, PlanWords, parse, schedule_of
from tawpipe.commands.plan_words import plan_parser as _parser
from tawpipe.errors import REPORT, UserError, is_fault
from tawpipe.garbage import leave_imports_alone, rarely_collected
from tawpipe.options import Open
from tawpipe.options.library import as_option

if TYPE_CHECKING:
    from tawpipe.plan.answer.lengths import Lengths
    from tawpipe.plan.cost.request import PlanRequest
    from tawpipe.plan.machine.machine import Machine
    from tawpipe.plan.search.plan import Plan
    from tawpipe.train.settings.config import TrainConfig

MOST_S = 15.0
"""Seconds of CPU time after which the search ends if it has found a strategy, unless ``--all`` is set."""
MOST_IN_PACK = 1000
"""Largest number of documents in the packed micro-batch that is measured."""


@rarely_collected()
def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe plan``: make a plan, print it, and return the exit code: 1 if nothing fits, else 0."""
    words = parse(_parser(), argv)
    try:
        words.check()
        return _run(words)
    except UserError as error:
        raise words.located(as_option(error)) from error
    except Exception as error:
        if is_fault(error):
            error.add_note(REPORT)
        raise


def _run(words: PlanWords) -> int:
    """Make the plan that the command line asks for, print it and write the requested files; return the exit code.

    With ``--topology probe``, processes other than rank 0 only help to measure the links, and return 0."""
    import torch

    from tawpipe.model.attention.attention_kernel import activate_flash
    from tawpipe.model.bits.lowbit import EXACT
    from tawpipe.model.files.build import text_config_of
    from tawpipe.pipeline.setup import refuse_settings
    from tawpipe.plan.answer.page import write_plan_page
    from tawpipe.plan.cost.measure import device_name
    from tawpipe.plan.machine.doctor import probe_machine
    from tawpipe.plan.search.plan import Plan, explain, json_text
    from tawpipe.plan.search.search import search
    from tawpipe.plan.search.sizes import with_best_size
    from tawpipe.runtime.dtype import AUTO, computes_in_bfloat16, usual_dtype
    from tawpipe.runtime.world import pick_device

    leave_imports_alone()
    config, talk = words.config, not words.json
    # Measure links before this process uses a GPU, as each process of a run begins with a GPU of its own.
    measured = probe_machine(config.device) if words.topology == PROBE else None
    if measured is None and words.topology == PROBE:
        return 0  # only rank 0 plans
    here = pick_device(config.device, 0)
    machine = _machine(words, here, measured)
    same, kind = device_name(here) == machine.device.name, "cpu" if machine.device.name == "CPU" else "cuda"
    fast = computes_in_bfloat16(here) if same else kind == "cuda"  # all GPUs with a known peak do
    fast |= words.serve and words.weights not in (None, AUTO, EXACT)  # kernels for few bits multiply in bfloat16
    dtype, why = (config.dtype, "as --dtype says") if config.dtype != AUTO else usual_dtype(fast, kind)
    if words.serve:
        with _progress_shown():
            request = request_for(words, machine, here=here, dtype=getattr(torch, dtype))
        return serve(request, as_json=words.json)
    corpus = _Corpus.of(words, machine.world_size) if words.of_corpus else None
    text_config = lambda: text_config_of(config.model, config.trust_remote_code)  # noqa: E731
    activate_flash(here, getattr(torch, dtype), text_config)  # as in a training run
    clipped = words.files and config.optimizer.clip_norm  # clipping is known from a file only
    refuse_settings(
        config.schedule,
        clip_norm=config.optimizer.clip_norm if clipped else None,
        compile_layers=config.compile,
        quantize=config.quantize,
        dtype=getattr(torch, dtype),
        on_gpus=kind == "cuda",
    )
    ask = partial(_request, words, machine=machine, here=here, dtype=getattr(torch, dtype), corpus=corpus)
    with _progress_shown():
        request = ask(config)
    if talk:
        print(f"{request.machine.topology}; {dtype} ({why}); {request.profile.source}")
    if words.longest:
        return _longest(request, words)
    if corpus is not None:
        return corpus.say(request, words)
    with _progress_shown():
        request = with_best_size(request)
        plan = Plan.of(request, search(request, most_s=lambda _: inf if words.all else MOST_S))
    if words.json:
        print(json_text(plan))
    else:
        for line in lines(plan, config, ask, everything=words.all):
            print(line, flush=True)
    if words.explain:
        for line in explain(plan, words.explain):
            print(line, file=sys.stdout if talk else sys.stderr)
    _write_page(words, lambda path: write_plan_page(plan, path))
    if words.save and plan.chosen:
        plan.save(Path(words.save))
        if talk:
            print(f"wrote {words.save} (tawpipe train --plan {words.save} follows it)")
    return 0 if plan.chosen else 1


def _progress_shown() -> AbstractContextManager[None]:
    """Return a context in which progress messages are printed on standard error."""
    from tawpipe.console import passing

    return passing(sys.stderr, indent="  ")


def _request(
    words: PlanWords, config: TrainConfig, *, machine: Machine, here: Any, dtype: Any, corpus: _Corpus | None
) -> PlanRequest:
    """Build the model, measure its blocks or estimate their times, and return the request that a plan answers.

    Args:
        words: arguments of the command line.
        config: settings of the run to plan.
        machine: machines to plan for.
        here: device of this process.
        dtype: type in which the model computes.
        corpus: documents of ``--lengths``, if that names a corpus; else None.
    """
    from tawpipe.model.chain import Chain
    from tawpipe.model.files.build import PRESETS, build_model
    from tawpipe.model.flops import work_of
    from tawpipe.model.refuse import settle_mtp
    from tawpipe.pipeline.setup import refuse_cut_rows
    from tawpipe.plan.cost.measure import Asked, filling_of, request_of
    from tawpipe.plan.cost.typical import LOOKED_AT, typical_documents
    from tawpipe.train.settings.optimizers import factory_of

    asked = Asked(
        words.row if corpus is None else corpus.row,
        words.batch or machine.world_size,
        int(config.micro_batch),
        dtype=dtype,
        lengths=_documents(words.lengths) if corpus is None else corpus.documents,
        profile=words.profile,
        memory_bytes=None if words.memory is None else int(words.memory * 2**30),
        settings=schedule_of(config),
        quantize=config.quantize,
        compiled=config.compile,
        optimizer=factory_of(config),
        learning_rate=float(config.learning_rate),
    )
    built = build_model(
        config.model,
        vocab_size=_vocabulary(words) if config.model in PRESETS else None,
        max_positions=asked.row,
        longest=asked.longest,
        rope=config.rope,
        lora=config.lora,
        frozen=config.freeze,
        trust_remote_code=config.trust_remote_code,
    )
    chain = Chain(built.model)
    if corpus is not None:
        steps = (corpus.lengths.step(corpus.tokens, number) for number in range(LOOKED_AT))
        asked = replace(asked, dealt=typical_documents(steps, corpus.most, work_of(chain)))
    if config.without_mtp:
        settle_mtp(chain.model, without=True)
    refuse_cut_rows(chain, config.schedule)
    if isinstance(config.micro_batch, Open) and corpus is None and not words.longest:
        _ = chain.balance_experts(config.experts.balance)
        kind = "cpu" if machine.device.name == "CPU" else "cuda"
        filling = filling_of(chain, machine.topology.evened(), kind, asked.settings, asked.global_batch, asked.row)
        asked = replace(asked, micro_batch=filling.sizes[-1], filling=filling)
    return request_of(chain, machine, asked, here=here)


def _vocabulary(words: PlanWords) -> int | None:
    """Return the vocabulary size for a preset: that of ``--tokenizer``, else ``vocab_size``; None if neither is set."""
    from tawpipe.data.tokenizer import load_tokenizer, vocabulary_size

    if words.config.tokenizer:
        return vocabulary_size(load_tokenizer(words.config.tokenizer))
    return words.config.vocab_size if words.files else words.user_value("vocab_size")


def _machine(words: PlanWords, here: Any, measured: Machine | None) -> Machine:
    """Return the machines to plan for, from ``--topology``, ``--device-name`` and ``--offload-dir``.

    The speed of ``--offload-dir`` is measured, unless the topology file has it.

    Args:
        words: arguments of the command line.
        here: device of this process.
        measured: machines that this command runs on, as measured for ``--topology probe``; else None.

    Raises:
        UserError: the device is not known, or ``--memory`` contradicts the topology.
    """
    import torch

    from tawpipe.model.flops import KNOWN_DEVICES
    from tawpipe.plan.cost.measure import device_name, machine_of
    from tawpipe.plan.machine.devices import Device
    from tawpipe.plan.machine.probe import probe_files

    name = "CPU" if (words.device_name or "").upper() == "CPU" else words.device_name
    machine = measured
    if machine is None:
        device = Device(name or "")
        if here.type == "cuda" and not device.name:  # assume that this machine is one of the cluster
            device = Device(device_name(here), int(torch.cuda.get_device_properties(here).total_memory))
        machine = machine_of(words.topology, device=device, name=name)
    if not machine.device.name and not machine.device.flops:
        known = f"{', '.join(KNOWN_DEVICES)}, or CPU to measure the blocks on this machine's processors"
        raise UserError("--device-name", "nothing", f"device type of {words.topology}: {known}")
    if words.memory is not None and machine.device_of:
        raise UserError("--memory", words.memory, f"unset: {words.topology} names the devices (device_of)")
    if words.config.schedule.offload_dir and machine.files_bytes == 0:
        link, free = probe_files(words.config.schedule.offload_dir)
        machine = replace(machine, files=link, files_bytes=free)
    return machine


def lines(
    plan: Plan, config: TrainConfig, ask: Callable[[TrainConfig], PlanRequest], *, everything: bool = False
) -> Iterator[str]:
    """Yield the lines to print about a plan: candidates, reasons for the choice, and alternatives.

    If nothing fits, the alternatives are settings that would fit.

    Args:
        plan: the plan.
        config: settings of the run.
        ask: makes the request for a plan with other settings.
        everything: see ``Plan.listed``.
    """
    from tawpipe.plan.answer.without_loss import without_loss
    from tawpipe.plan.answer.would_fit import WouldFit
    from tawpipe.plan.search.plan import crossing, other_rows

    if plan.listed(everything=everything):
        yield from plan.table(everything=everything)
    yield from plan.left_out(everything=everything)
    yield from ("", plan.reason)
    yield from filter(None, (plan.memory, plan.micro_batch))
    if plan.chosen is None:
        of_size = lambda other: ask(other).with_micro_batch(plan.request.micro_batch)  # noqa: E731
        yield from (f"would fit: {way}" for way in WouldFit(plan.request, config, of_size).ways())
    if plan.chosen and (words := other_rows(plan.request, plan.chosen)):
        yield words
    if plan.chosen and plan.runner_up and (words := crossing(plan.request, plan.chosen, plan.runner_up)):
        yield words
    yield from without_loss(plan)


def _write_page(words: PlanWords, write: Callable[[Path], object]) -> None:
    """With ``--report``, call ``write`` with the file of the HTML page, and print its name; else do nothing."""
    if words.report:
        write(Path(words.report))
        if not words.json:
            print(f"wrote {words.report}")


def _longest(request: PlanRequest, words: PlanWords) -> int:
    """Answer ``--longest``: find the longest row and print it; return the exit code, 1 if no row fits."""
    from tawpipe.plan.answer.longest import ASSUMPTIONS, POSITIONS, Longest, limit_of
    from tawpipe.plan.answer.page import write_longest_page
    from tawpipe.plan.cost.request import MOST_TOKENS

    most, asked = request.sequence_length, words.row or MOST_TOKENS
    with _progress_shown():
        longest = Longest.of(request, ends=limit_of(most) if most == asked else POSITIONS)
    if words.json:
        print(longest.json_text())
    else:
        print(ASSUMPTIONS)
        for line in longest.table():
            print(line)
        print(f"\n{longest.reason}")
        if longest.memory:
            print(longest.memory)
    _write_page(words, lambda path: write_longest_page(longest, path))
    return 0 if longest.best else 1


def _documents(lengths: str | None) -> list[int]:
    """Return the document lengths that ``--lengths`` lists; ``[]`` if it is not given: one document fills the row.

    Raises:
        UserError: ``lengths`` is not a list of numbers.
    """
    if lengths is None:
        return []
    try:
        return [int(word) for word in lengths.split(",")]
    except ValueError as error:
        raise UserError("--lengths", lengths, "numbers of tokens, separated by commas") from error


@dataclass(frozen=True)
class _Corpus:
    """Documents of a corpus (``--lengths``), and the sizes of steps and packed micro-batches.

    Args:
        lengths: lengths of all documents.
        most: largest number of tokens of a document.
        tokens: tokens of a step.
        row: tokens of a full packed micro-batch.
        documents: document lengths that fill one.
    """

    lengths: Lengths
    most: int
    tokens: int
    row: int
    documents: list[int]

    @classmethod
    def of(cls, words: PlanWords, world_size: int) -> _Corpus:
        """Read or draw the document lengths that ``--lengths`` names, and settle the sizes of steps and micro-batches.

        Call only if ``--lengths`` names a corpus. Without ``--max-document``, the longest document of the corpus
        counts. Without ``--tokens-per-step``, a step has ``--global-batch`` rows.

        Raises:
            UserError: a size is missing that has no default, or a step is too small for the longest document.
        """
        from tawpipe.plan.answer.lengths import LOGNORMAL, Lengths, lengths_of
        from tawpipe.train.settings.decided import BatchShape

        assert words.lengths is not None
        lengths = Lengths.of(*_tokenised(words)) if words.lengths == CORPUS else lengths_of(words.lengths)
        most, step = words.user_value("max_document") or words.row, words.user_value("tokens_per_step")
        if most is None and words.lengths.startswith(LOGNORMAL):
            raise UserError("--max-document", "nothing", f"the longest document in tokens: {LOGNORMAL} has no limit")
        most = min(most or lengths.longest, lengths.longest)
        lengths = lengths.cut(most)
        if step is None and (rows := words.user_value("global_batch")) is not None:
            step = rows * (words.row or most)
        if step is None or step < most:
            value = "nothing" if step is None else step
            raise UserError("--tokens-per-step", value, f"at least {most}, the length of the longest document")
        config = replace(words.config, tokens_per_step=step, max_document=most)
        row = BatchShape.of(config, "balanced", world_size).bin_tokens
        documents = lengths.step(row, -1)[:MOST_IN_PACK]
        documents[0] = min(documents[0], row)
        while (left := row - sum(documents)) > 0:
            documents.append(min(left, most))
        return cls(lengths, most, step, row, documents)

    def say(self, request: PlanRequest, words: PlanWords) -> int:
        """Predict steps on these documents and print the result; return the exit code, 1 if nothing fits."""
        from tawpipe.plan.answer.dealt import DealReport
        from tawpipe.plan.answer.dealt_words import json_text, lines, write_dealt_page

        with _progress_shown():
            dealt = DealReport.of(request, self.lengths, tokens=self.tokens, max_document=self.most)
        for line in [json_text(dealt)] if words.json else lines(dealt):
            print(line)
        _write_page(words, lambda path: write_dealt_page(dealt, path))
        return 0 if dealt.best else 1


def _tokenised(words: PlanWords) -> tuple[Any, str]:
    """Tokenise the documents of ``--data``; return their lengths in tokens, and words about the source."""
    from tawpipe.data.reading.cache import cache_root
    from tawpipe.data.reading.hub import opened
    from tawpipe.data.reading.sources import find_sets
    from tawpipe.data.tokenised import TokenisedText

    config = words.config
    files = opened(
        [file for source in find_sets(config.data) for file in source.files], streaming=False, setting="--data"
    )
    folder = config.model if Path(config.model).is_dir() else None
    text = TokenisedText(config, files, cache_root(config.cache_dir), tokenizer=None, model=folder)
    corpus, _ = text.corpus(files, "--data")
    return corpus.lengths, f"{', '.join(config.data)}, {len(corpus.lengths):,} documents"
