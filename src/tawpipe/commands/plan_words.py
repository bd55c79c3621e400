"""What ``tawpipe plan`` is told: words of its own, and the settings of a training run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from tawpipe.errors import UserError
from tawpipe.options import CommandParser, Leaf, Open, field_help, first_sentence
from tawpipe.options.names import option_of
from tawpipe.schedule.settings import KEPT_BY_PLANS, UNPLANNED, ScheduleSettings, chosen_by_hand
from tawpipe.serving.service.settings import WeightForm
from tawpipe.train.settings.checks import check_plannable
from tawpipe.train.settings.config import TrainConfig, train_options
from tawpipe.train.settings.names import ELSEWHERE

PROBE, CORPUS = "probe", "corpus"
LEADING = {
    "--model": "meta-llama/Llama-3.1-8B",
    "--config": "run.yaml",
    "--topology": "3x8@100gbit",
    "--device-name": "H100",
    "--sequence-length": "32768",
    "--global-batch": "96",
    "--longest": "",
    "--serve": "",
    "--users": "16",
    "--context": "8192",
    "--dtype": "bfloat16",
    "--lora.rank": "16",
    "--report": "plan.html",
    "--save": "plan.yaml",
}
"""What ``--help`` shows, each with an example."""
OF_RUN = (
    *("model", "sequence_length", "global_batch", "micro_batch", "tokens_per_step", "max_document", "bin_tokens"),
    *("data", "rows", "columns", "tokenizer", "cache_dir", "vocab_size", "dtype", "quantize", "freeze", "compile"),
    *("without_mtp", "trust_remote_code", "device", "optimizer.name"),
    *(f"schedule.{name}" for name in (*UNPLANNED, *KEPT_BY_PLANS)),
)
"""Settings of a training run that a plan looks at, besides those of groups that it looks at whole."""
WHOLE_GROUPS = ("rope", "lora")
SHORT = {"optimizer.name": "--optimizer"} | {
    f"schedule.{name}": f"--{name.replace('_', '-')}"
    for name in ("early_updates", "sequence_chunk", "sequence_ranks", "offload_dir")
}
"""Settings that have a shorter name here."""
BINS = ("tokens_per_step", "max_document", "bin_tokens")
OF_TRAINING = ("sequence_length", "global_batch", "lengths", "explain", "report", "save", "all")
"""What a plan for training is told and one for serving is not."""
TAKEN: dict[str, dict[str, Any]] = {
    "topology": {"required": True},
    "longest": {"action": "store_true"},
    "serve": {"action": "store_true"},
    "users": {"type": int, "metavar": "U"},
    "context": {"type": int, "metavar": "C"},
    "weights": {"choices": get_args(WeightForm)},
    "lengths": {"metavar": "TOKENS,...|corpus|FILE|lognormal:MU,SIGMA"},
    "memory": {"type": float, "metavar": "GIB"},
    "device_name": {"metavar": "NAME"},
    "profile": {"default": "auto"},
    "all": {"action": "store_true"},
    "json": {"action": "store_true"},
    "explain": {"metavar": "STRATEGY"},
    "report": {"metavar": "FILE"},
    "save": {"metavar": "FILE"},
}
"""How words are taken that are no settings of a run."""


@dataclass(frozen=True)
class PlanWords:
    """What a plan is asked for, in words; what stands under one is its help.

    Args:
        config: the settings of the run that it is for.
        said: of those, the values that words and files have given, by their paths.
        words: the values that words have given, by the keys of the settings.
        files: that ``--config`` names.
    """

    config: TrainConfig
    said: Mapping[tuple[str, ...], Any]
    words: Mapping[str, Any]
    files: Sequence[str]

    topology: str
    """a file of `tawpipe doctor`, in short 3x8@10gbit, or probe: what this is started on"""
    longest: bool
    """say how long a row may be, under every strategy, and what binds; --sequence-length is then the most that is
    looked at, and --global-batch one row for every device, if not given"""
    serve: bool
    """say how --users users, each with a prompt and an answer of --context tokens, are served: on one machine, on
    copies, or in stages, and the times of their tokens"""
    users: int | None
    """with --serve, users whose tokens come at the same time"""
    context: int | None
    """with --serve, tokens of a user's prompt and answer"""
    weights: str | None
    """with --serve, few bits for the matrices of layers, as `tawpipe serve` has them (default: auto)"""
    lengths: str | None
    """of the documents in a row (default: one fills it); or of a corpus, whose documents are dealt by time: those of
    --data, a file with a length and how many have it on every line, or drawn"""
    memory: float | None
    """of a device, instead of what the topology says"""
    device_name: str | None
    """what computes, if not what the topology says: H100, A100, CPU, ..."""
    profile: str
    """measure here, estimate from the device's peak, or auto"""
    all: bool
    """show every strategy, those as well that others have overtaken"""
    json: bool
    """print JSON and nothing else"""
    explain: str | None
    """where the time and the memory of one candidate go"""
    report: str | None
    """write a page (HTML) with the comparison and timelines"""
    save: str | None
    """write the choice for `tawpipe train --plan FILE`"""

    def given(self, name: str) -> Any:
        """The value of a setting at the top; None if nobody has said one, or left it to the run."""
        value = getattr(self.config, name)
        return value if (name,) in self.said and not isinstance(value, Open) else None

    @property
    def of_corpus(self) -> bool:
        """True if ``--lengths`` says a corpus and not the documents of a row."""
        return self.lengths is not None and not re.fullmatch(r"[\d\s,]+", self.lengths)

    @property
    def row(self) -> int | None:
        """Tokens of a row; None where the longest one is asked for, whatever the run's are."""
        return self.given("sequence_length") if not self.longest or "sequence_length" in self.words else None

    @property
    def batch(self) -> int | None:
        """Rows of a step; None where the longest row is asked for, of which every device gets one."""
        return self.given("global_batch") if not self.longest or "global_batch" in self.words else None

    def located(self, error: UserError) -> UserError:
        """The same error with the file and the line of its setting, if it is from one."""
        return train_options().located_in(error, self.files, self.words)

    def check(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        config, several = self.config, self.config.micro_batch if self.config.micro_batch > 1 else None
        conflicts: list[tuple[str, Any, str]] = []
        if self.serve:
            said = {**self.words, **vars(self), "all": self.all or None}
            why = "unset with --serve, which trains nothing"
            conflicts.append(("--longest", self.longest or None, "unset with --serve"))
            conflicts += [(option_of(name), said.get(name), why) for name in OF_TRAINING]
            for name in ("users", "context"):
                if said[name] is None:
                    raise UserError(
                        f"--{name}", "nothing", ("a number of users served at once, and of tokens per user")
                    )
        else:
            given = ("users", "context", "weights")
            conflicts += [(f"--{name}", getattr(self, name), "unset without --serve") for name in given]
        if self.longest:
            conflicts += [
                ("--lengths", self.lengths, "unset with --longest: one document fills the row"),
                ("--micro-batch", several, "1 with --longest"),
                ("--explain", self.explain, "unset with --longest (--json shows every part)"),
                ("--save", self.save, "unset with --longest; save a plan for the length that it finds"),
            ]
        if self.of_corpus:
            conflicts += [
                ("--micro-batch", several, "1: a packed micro-batch is one row"),
                ("--explain", self.explain, "unset with --lengths of a corpus (--json shows every part)"),
                ("--save", self.save, "unset with --lengths of a corpus: the run makes its own plan"),
            ]
        else:
            balanced = config.packing if config.packing == "balanced" else None
            bins = [(f"--{name.replace('_', '-')}", self.given(name)) for name in BINS]
            conflicts += [(name, value, "unset without --lengths of a corpus") for name, value in bins]
            conflicts += [("--packing", balanced, "another packing, or --lengths of a corpus")]
        for name in chosen_by_hand(config.schedule):
            value = getattr(config.schedule, name)
            conflicts.append((f"--schedule.{name.replace('_', '-')}", value, "unset: the plan chooses it"))
        for name, value, expected in conflicts:
            if value is not None:
                raise UserError(name, value, expected)
        if self.memory is not None and not self.memory > 0:
            raise UserError("--memory", self.memory, "more than 0")
        check_plannable(config)
        if config.schedule.offload_dir and config.schedule.sequence_chunk == 0:
            raise UserError("--offload-dir", config.schedule.offload_dir, "unset with --sequence-chunk 0")
        from tawpipe.report.page import check_page
        from tawpipe.schedule.strategies.table import strategies

        check_page(self.report)
        if self.save and (Path(self.save).is_dir() or not Path(self.save).absolute().parent.is_dir()):
            raise UserError("--save", self.save, "a file in a folder that exists")
        if self.explain and self.explain not in strategies():
            raise UserError("--explain", self.explain, f"one of {', '.join(strategies())}")


def schedule_of(config: TrainConfig) -> ScheduleSettings:
    """The settings of the schedule, with what the run's evaluations leave no choice of."""
    by_row = config.micro_batch > 1 and config.evaluation.retrieval_lengths
    settings = config.schedule
    return replace(settings, sequence_ranks=1) if by_row and settings.sequence_ranks is None else settings


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> PlanWords:
    """The words that follow ``tawpipe plan``, which has this parser.

    Raises:
        UserError: an unknown option or key, a value of the wrong type, an unreadable file.
        SystemExit: help, or a word that is missing.
    """
    options = train_options()
    arguments = vars(parser.parse_args(argv))
    words = {leaf.key: arguments.pop(leaf.key) for leaf in _leaves() if leaf.key in arguments}
    files = arguments.pop("config")
    said = options.values(files, words)
    config = options.build(said)
    if isinstance(
        config.learning_rate, Open
    ):  # of no effect on a plan, which some optimizers could not be made without
        config = replace(config, learning_rate=float(config.learning_rate))
    asked = PlanWords(config, said, words, files, **arguments)
    needed = {"--model": True}
    needed |= dict.fromkeys(
        ("--sequence-length", "--global-batch"), not (asked.longest or asked.serve or asked.of_corpus)
    )
    missing = [name for name, needs in needed.items() if needs and asked.given(name[2:].replace("-", "_")) is None]
    for name in missing:
        if (key := name[2:].replace("-", "_"),) in asked.said:
            raise UserError(name, getattr(config, key).word, "a number: a plan reads no documents to derive it from")
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return asked


def _leaves() -> list[Leaf]:
    """The settings of a run that may follow ``tawpipe plan``."""
    known = train_options().leaves.values()
    return [leaf for leaf in known if leaf.key in OF_RUN or leaf.path[0] in WHOLE_GROUPS]


def plan_parser() -> argparse.ArgumentParser:
    """The parser of ``tawpipe plan``."""
    parser = CommandParser(
        leading=LEADING,
        elsewhere=ELSEWHERE,
        prog="tawpipe plan",
        usage="%(prog)s --model MODEL --topology TOPOLOGY [--config FILE] [--OPTION VALUE ...]",
        description=(
            "Predicts the cost of every strategy on given machines, chooses the best one and says why. Exit code "
            "1 if nothing fits."
        ),
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="settings of a training run, as for `tawpipe train`; command-line options override the file",
    )
    helps = field_help(PlanWords)
    for name, how in TAKEN.items():
        parser.add_argument(option_of(name), help=helps[name], **how)
    for leaf in _leaves():
        how: dict[str, Any] = {"nargs": "*"} if leaf.is_list else {}
        how |= {"nargs": "?", "const": "true"} if leaf.hint is bool else {}
        names = [SHORT[leaf.key]] if leaf.key in SHORT else []
        words = f"{first_sentence(leaf.help)} (as in the training run)".replace("%", "%%")
        parser.add_argument(
            *names, leaf.option, dest=leaf.key, metavar="X", default=argparse.SUPPRESS, help=words, **how
        )
    return parser
