"""``tawpipe plan``: the words that follow it on the command line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tawpipe.data.settings import DataSettings
from tawpipe.errors import UserError
from tawpipe.garbage import rarely_collected
from tawpipe.model.settings import LoraSettings, RopeSettings
from tawpipe.options import CommandParser, Leaf, first_sentence, tree
from tawpipe.train.config import TAKES
from tawpipe.train.names import ELSEWHERE

if TYPE_CHECKING:
    from tawpipe.plan.lengths import Lengths
    from tawpipe.plan.plan import Plan
    from tawpipe.plan.request import PlanRequest

T = TypeVar("T", RopeSettings, LoraSettings)
PROBE = "probe"
ROPE = [leaf for leaf in tree(RopeSettings, ("rope",)) if isinstance(leaf, Leaf)]
LORA = [leaf for leaf in tree(LoraSettings, ("lora",)) if isinstance(leaf, Leaf)]
OF_DATA = ("data", "rows", "columns", "tokenizer", "cache_dir")
DATA = [leaf for leaf in tree(DataSettings) if isinstance(leaf, Leaf) and leaf.path[-1] in OF_DATA]
CORPUS = "corpus"
MOST_IN_BIN = 1000
"""Documents of a bin by which memory and seconds are measured."""
DTYPES = ("auto", "float32", "bfloat16", "float64")
FORMS = ("none", "nf4", "int8")
LEADING = {
    "--model": "meta-llama/Llama-3.1-8B",
    "--topology": "3x8@100gbit",
    "--device-name": "H100",
    "--sequence-length": "32768",
    "--global-batch": "96",
    "--longest": "",
    "--dtype": "bfloat16",
    "--lora.rank": "16",
    "--report": "plan.html",
    "--save": "plan.yaml",
}
"""What ``--help`` shows, each with an example."""


@rarely_collected()
def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe plan`` with the words ``argv`` and returns the exit code."""
    arguments = _parse(argv)
    _check(arguments)
    rope, lora = _group(arguments, ROPE, RopeSettings), _group(arguments, LORA, LoraSettings)
    import torch

    from tawpipe.model.attention_kernel import activate_flash
    from tawpipe.model.build import text_config_of
    from tawpipe.model.flops import KNOWN_DEVICES
    from tawpipe.plan.doctor import probe_machine
    from tawpipe.plan.machine import Device
    from tawpipe.plan.measure import device_name, machine_of, request_of
    from tawpipe.plan.page import write_plan_page
    from tawpipe.plan.plan import Plan, explain, json_text
    from tawpipe.plan.probe import probe_files
    from tawpipe.plan.search import search
    from tawpipe.runtime.dtype import AUTO, computes_in_bfloat16, usual_dtype
    from tawpipe.runtime.named_optimizers import BY_NAME
    from tawpipe.runtime.world import pick_device
    from tawpipe.schedule.settings import ScheduleSettings

    probed = None
    if arguments.topology == PROBE:
        probed = probe_machine(arguments.device)
        if probed is None:
            return 0  # rank 0 plans
    here = pick_device(arguments.device, 0)
    name = "CPU" if (arguments.device_name or "").upper() == "CPU" else arguments.device_name
    device = Device(name or "")
    if here.type == "cuda" and not device.name:  # clusters are planned on one of their machines
        device = Device(device_name(here), int(torch.cuda.get_device_properties(here).total_memory))
    machine = probed or machine_of(arguments.topology, device=device, name=name)
    if not machine.device.name and not machine.device.flops:
        known = f"{', '.join(KNOWN_DEVICES)}, or CPU to measure the blocks on this machine's processors"
        raise UserError("--device-name", "nothing", f"what {arguments.topology} computes with: {known}")
    if arguments.offload_dir and machine.files_bytes == 0:
        link, free = probe_files(arguments.offload_dir)
        machine = replace(machine, files=link, files_bytes=free)
    same, kind = device_name(here) == machine.device.name, "cpu" if machine.device.name == "CPU" else "cuda"
    fast = computes_in_bfloat16(here) if same else kind == "cuda"  # as all do whose peak is known
    dtype, why = (arguments.dtype, "as --dtype says") if arguments.dtype != AUTO else usual_dtype(fast, kind)
    tell = lambda line: print(f"  {line}", file=sys.stderr, flush=True)  # noqa: E731
    corpus, row, documents = _uneven(arguments, machine.world_size)
    config = lambda: text_config_of(arguments.model, arguments.trust_remote_code)  # noqa: E731
    activate_flash(here, getattr(torch, dtype), config)  # as the training run does
    request = request_of(
        arguments.model,
        machine,
        sequence_length=row,
        global_batch=machine.world_size if arguments.global_batch is None else arguments.global_batch,
        micro_batch=arguments.micro_batch,
        dtype=getattr(torch, dtype),
        lengths=documents,
        profile=arguments.profile,
        vocab_size=arguments.vocab_size,
        memory_bytes=None if arguments.memory is None else int(arguments.memory * 2**30),
        settings=ScheduleSettings(
            early_updates=arguments.early_updates,
            sequence_chunk=arguments.sequence_chunk,
            sequence_ranks=arguments.sequence_ranks,
            offload_dir=arguments.offload_dir,
        ),
        rope=rope,
        lora=lora,
        frozen=arguments.freeze,
        quantize=arguments.quantize,
        trust_remote_code=arguments.trust_remote_code,
        optimizer=BY_NAME[arguments.optimizer](1e-3),
        here=here,
        tell=tell,
    )
    talk = not arguments.json
    if talk:
        print(f"{request.machine.topology}; {dtype} ({why}); {request.profile.source}")
    if arguments.longest:
        return _longest(request, arguments, tell)
    if corpus is not None:
        return _dealt(request, corpus, arguments, tell)
    plan = Plan.of(request, search(request, tell=tell, waiting=tell))
    if arguments.json:
        print(json_text(plan))
    else:
        for line in lines(plan):
            print(line)
    if arguments.explain:
        for line in explain(plan, arguments.explain):
            print(line, file=sys.stdout if talk else sys.stderr)
    _write_page(arguments, lambda path: write_plan_page(plan, path))
    if arguments.save and plan.chosen:
        plan.save(Path(arguments.save))
        if talk:
            print(f"wrote {arguments.save}; tawpipe train --plan {arguments.save} follows it")
    return 0 if plan.chosen else 1


def lines(plan: Plan) -> Iterator[str]:
    """What is printed of a plan: the candidates, the reasons of the choice, and other ways."""
    from tawpipe.plan.plan import crossing
    from tawpipe.plan.remedy import smaller

    yield from plan.table()
    yield from ("", plan.reason)
    if plan.memory:
        yield plan.memory
    if plan.chosen is None and plan.least is not None and plan.least.step is not None:
        yield from (f"would fit: {line}" for line in smaller(plan.request, plan.least.step))
    if plan.chosen and plan.runner_up and (words := crossing(plan.request, plan.chosen, plan.runner_up)):
        yield words


def _longest(request: PlanRequest, arguments: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """``--longest``: the answer, and the exit code."""
    from tawpipe.plan.longest import GIVEN, POSITIONS, Longest, limit_of
    from tawpipe.plan.page import write_longest_page
    from tawpipe.plan.request import MOST_TOKENS

    most = request.sequence_length
    asked = MOST_TOKENS if arguments.sequence_length is None else arguments.sequence_length
    found = Longest.of(request, ends=limit_of(most) if most == asked else POSITIONS, tell=tell)
    if arguments.json:
        print(found.json_text())
    else:
        print(GIVEN)
        for line in found.table():
            print(line)
        print(f"\n{found.reason}")
        for line in filter(None, (found.memory, found.hides)):
            print(line)
    _write_page(arguments, lambda path: write_longest_page(found, path))
    return 0 if found.best else 1


def _write_page(arguments: argparse.Namespace, write: Callable[[Path], object]) -> None:
    if arguments.report:
        write(Path(arguments.report))
        if not arguments.json:
            print(f"wrote {arguments.report}")


def _dealt(request: PlanRequest, lengths: Lengths, arguments: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """``--lengths`` of a corpus: the foresight, and the exit code."""
    from tawpipe.plan.dealt import Dealt
    from tawpipe.plan.dealt_words import json_text, lines, write_dealt_page

    asked = {"tokens": arguments.tokens_per_step, "max_document": arguments.max_document}
    found = Dealt.of(request, lengths, **asked, tell=tell)
    for line in [json_text(found)] if arguments.json else lines(found):
        print(line)
    _write_page(arguments, lambda path: write_dealt_page(found, path))
    return 0 if found.best else 1


def _uneven(arguments: argparse.Namespace, world_size: int) -> tuple[Lengths | None, int | None, list[int] | None]:
    """The lengths of a corpus, tokens of a full bin and documents that fill one; or nothing, and a row's. What was not
    given is filled in.
    """
    if not _of_corpus(arguments):
        return None, arguments.sequence_length, _lengths(arguments.lengths)
    from tawpipe.plan.lengths import LOGNORMAL, Lengths, lengths_of
    from tawpipe.schedule.settings import ScheduleSettings
    from tawpipe.train.config import TrainConfig, in_bins

    own = arguments.lengths == CORPUS
    lengths = Lengths.of(*_tokenised(arguments)) if own else lengths_of(arguments.lengths)
    most, step = arguments.max_document or arguments.sequence_length, arguments.tokens_per_step
    if most is None and arguments.lengths.startswith(LOGNORMAL):
        raise UserError("--max-document", "nothing", f"the most tokens of a document: {LOGNORMAL} has none")
    arguments.max_document = most = min(most or lengths.longest, lengths.longest)
    lengths = lengths.cut(most)
    if step is None and arguments.global_batch is not None:
        step = arguments.tokens_per_step = arguments.global_batch * (arguments.sequence_length or most)
    if step is None or step < most:
        raise UserError(
            "--tokens-per-step", "nothing" if step is None else step, f"at least {most}, the longest document's"
        )
    asked = {"tokens_per_step": step, "max_document": most, "bin_tokens": arguments.bin_tokens}
    schedule = ScheduleSettings(sequence_ranks=arguments.sequence_ranks)
    row = in_bins(TrainConfig(schedule=schedule, **asked), world_size).bin_tokens or most
    documents = lengths.step(row, -1)[:MOST_IN_BIN]
    documents[0] = min(documents[0], row)
    while (left := row - sum(documents)) > 0:
        documents.append(min(left, most))
    return lengths, row, documents


def _tokenised(arguments: argparse.Namespace) -> tuple[Any, str]:
    """Lengths of the documents of ``--data``, in tokens, and their source in words."""
    from tawpipe.data.cache import cache_root
    from tawpipe.data.hub import opened
    from tawpipe.data.sources import find_sets
    from tawpipe.data.tokenised import TokenisedText

    given = [(leaf, leaf.read(word)) for leaf in DATA if (word := getattr(arguments, leaf.key)) is not None]
    settings = DataSettings(**{leaf.path[-1]: value for leaf, value in given})
    if arguments.vocab_size is not None:
        settings = replace(settings, vocab_size=arguments.vocab_size)
    settings.check_data()
    found = [file for one in find_sets(settings.data) for file in one.files]
    files = opened(found, streaming=False, setting="--data")
    folder = arguments.model if Path(arguments.model).is_dir() else None
    text = TokenisedText(settings, files, cache_root(settings.cache_dir), tokenizer=None, model=folder)
    corpus, _ = text.corpus(files, "--data")
    return corpus.lengths, f"{', '.join(settings.data)}, {len(corpus.lengths):,} documents"


def _of_corpus(arguments: argparse.Namespace) -> bool:
    """True if ``--lengths`` says a corpus and not the documents of a row."""
    return arguments.lengths is not None and not re.fullmatch(r"[\d\s,]+", arguments.lengths)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded."""
    for name, value, expected in (
        ("--lengths", arguments.lengths, "nothing with --longest: one document fills the row"),
        ("--micro-batch", None if arguments.micro_batch == 1 else arguments.micro_batch, "1 with --longest"),
        ("--explain", arguments.explain, "nothing with --longest, whose --json has every part"),
        ("--save", arguments.save, "nothing with --longest; a plan for the length that it finds can be saved"),
    ):
        if arguments.longest and value is not None:
            raise UserError(name, value, expected)
    for name in ("tokens_per_step", "max_document", "bin_tokens"):
        option, value = f"--{name.replace('_', '-')}", getattr(arguments, name)
        if value is not None and not _of_corpus(arguments):
            raise UserError(option, value, "nothing without --lengths of a corpus")
        if value is not None and value < 2:
            raise UserError(option, value, "at least 2")
    if _of_corpus(arguments):
        for name, value, expected in (
            ("--micro-batch", None if arguments.micro_batch == 1 else arguments.micro_batch, "1: a bin is a row"),
            ("--explain", arguments.explain, "nothing with --lengths of a corpus, whose --json has every part"),
            ("--save", arguments.save, "nothing with --lengths of a corpus: the run makes its own plan"),
        ):
            if value is not None:
                raise UserError(name, value, expected)
    if arguments.memory is not None and not arguments.memory > 0:
        raise UserError("--memory", arguments.memory, "more than 0")
    if arguments.sequence_chunk is not None and arguments.sequence_chunk < 0:
        raise UserError("--sequence-chunk", arguments.sequence_chunk, "at least 0")
    if arguments.offload_dir and arguments.sequence_chunk == 0:
        raise UserError("--offload-dir", arguments.offload_dir, "nothing with --sequence-chunk 0")
    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        raise UserError("--vocab-size", arguments.vocab_size, "at least 1")
    from tawpipe.report.page import check_page
    from tawpipe.schedule.strategies.table import strategies

    check_page(arguments.report)
    if arguments.explain and arguments.explain not in strategies():
        raise UserError("--explain", arguments.explain, f"one of {', '.join(strategies())}")


def _group(arguments: argparse.Namespace, leaves: Sequence[Leaf], kind: type[T]) -> T:
    """The settings of a group as they were given, which are checked."""
    given = [(leaf, leaf.read(word)) for leaf in leaves if (word := getattr(arguments, leaf.key)) is not None]
    for leaf, value in given:
        leaf.check(value)
    made = kind(**{leaf.path[-1]: value for leaf, value in given})
    made.check()
    return made


def _lengths(words: str | None) -> list[int] | None:
    if words is None:
        return None
    try:
        return [int(word) for word in words.split(",")]
    except ValueError as error:
        raise UserError("--lengths", words, "numbers of tokens, separated by commas") from error


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    needed = {"--sequence-length": arguments.sequence_length, "--global-batch": arguments.global_batch}
    missing = [name for name, value in needed.items() if value is None]
    if missing and not arguments.longest and not _of_corpus(arguments):
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        leading=LEADING,
        elsewhere=ELSEWHERE,
        prog="tawpipe plan",
        usage="%(prog)s --model MODEL --topology TOPOLOGY [--OPTION VALUE ...]",
        description="Says beforehand what every strategy would cost on some machines, which one is best, and why. Exit "
        "code 1 if nothing fits.",
    )
    parser.add_argument("--model", required=True, help="a preset, a folder with config.json, or a name on the Hub")
    parser.add_argument(
        "--topology",
        required=True,
        help="a file of `tawpipe doctor`, in short 3x8@10gbit, or probe: what this is started on",
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="TOKENS",
        help="tokens in a row; with --longest the most that are looked at",
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="SEQUENCES",
        help="rows in a step, over all devices; with --longest one for every device, if not given",
    )
    parser.add_argument(
        "--longest", action="store_true", help="say how long a row may be, under every strategy, and what binds"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=1, metavar="SEQUENCES", help="computed at one time (default: 1)"
    )
    parser.add_argument(
        "--lengths",
        metavar="TOKENS,...|corpus|FILE|lognormal:MU,SIGMA",
        help="of the documents in a row (default: one fills it); or of a corpus, whose documents are dealt by time: "
        "those of --data, a file with a length and how many have it on every line, or drawn",
    )
    parser.add_argument("--tokens-per-step", type=int, metavar="TOKENS", help="of the documents in a step, of a corpus")
    parser.add_argument(
        "--max-document", type=int, metavar="TOKENS", help="longer documents are cut (default: the longest stays whole)"
    )
    parser.add_argument(
        "--bin-tokens",
        type=int,
        metavar="TOKENS",
        help="that a device computes at one time at most (default: as in a training run)",
    )
    for leaf in DATA:
        many = "*" if leaf.is_list else None
        expected = "as in the training run, for --lengths corpus"
        parser.add_argument(leaf.option, dest=leaf.key, nargs=many, metavar="X", help=expected)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="in which the model computes, as in the training run (default: auto)",
    )
    parser.add_argument("--quantize", choices=FORMS, default=FORMS[0], help="as in the training run (default: none)")
    parser.add_argument(
        "--optimizer",
        choices=tuple(TAKES),
        default="adamw",
        help="as in the training run's optimizer.name: its states and updates; adafactor and muon need whole matrices",
    )
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a device, instead of what the topology says")
    parser.add_argument(
        "--device-name", metavar="NAME", help="what computes, if not what the topology says: H100, A100, CPU, ..."
    )
    parser.add_argument("--profile", default="auto", help="measure here, estimate from the device's peak, or auto")
    parser.add_argument("--vocab-size", type=int, metavar="TOKENS", help="of a preset's tokenizer")
    for leaf in [*ROPE, *LORA]:
        how: dict[str, Any] = {"nargs": "*"} if leaf.is_list else {}
        how |= {"nargs": "?", "const": "true"} if leaf.hint is bool else {}
        words = f"{first_sentence(leaf.help)} (as in the training run)".replace("%", "%%")
        parser.add_argument(leaf.option, dest=leaf.key, metavar="X", help=words, **how)
    parser.add_argument("--freeze", nargs="*", default=(), metavar="PATTERN", help="as in the training run")
    parser.add_argument("--early-updates", action="store_true", help="as in the training run's schedule.early_updates")
    parser.add_argument(
        "--sequence-chunk",
        type=int,
        metavar="TOKENS",
        help="as in the training run's schedule.sequence_chunk; 0 for whole rows (default: the plan chooses)",
    )
    parser.add_argument(
        "--sequence-ranks",
        type=int,
        metavar="DEVICES",
        help="as in the training run's schedule.sequence_ranks; 1 for rows by one device (default: the plan chooses)",
    )
    parser.add_argument(
        "--offload-dir",
        default="",
        metavar="FOLDER",
        help="as in the training run's schedule.offload_dir; its disk is measured, unless the topology has `files`",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="to measure on")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--explain", metavar="STRATEGY", help="where the time and the memory of one candidate go")
    parser.add_argument("--report", metavar="FILE", help="write a page (HTML) with the comparison and timelines")
    parser.add_argument("--save", metavar="FILE", help="write the choice for `tawpipe train --plan FILE`")
    return parser
