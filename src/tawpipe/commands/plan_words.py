"""Command line of ``tawpipe plan``: options of its own, and settings of a training run."""

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
"""Options that ``--help`` shows, each with an example."""
OF_RUN = (
    *("model", "sequence_length", "global_batch", "micro_batch", "tokens_per_step", "max_document", "bin_tokens"),
    *("data", "rows", "columns", "tokenizer", "cache_dir", "vocab_size", "dtype", "quantize", "freeze", "compile"),
    *("without_mtp", "trust_remote_code", "device", "optimizer.name"),
    *(f"schedule.{name}" for name in (*UNPLANNED, *KEPT_BY_PLANS)),
)
"""Settings of a training run that a plan uses, in addition to the groups in ``WHOLE_GROUPS``."""
WHOLE_GROUPS = ("rope", "lora")
SHORT = {"optimizer.name": "--optimizer"} | {
    f"schedule.{name}": f"--{name.replace('_', '-')}"
    for name in ("early_updates", "sequence_chunk", "sequence_ranks", "offload_dir")
}
"""Settings that also have a shorter name in this command."""
PACK_OPTIONS = ("tokens_per_step", "max_document", "bin_tokens")
OF_TRAINING = ("sequence_length", "global_batch", "lengths", "explain", "report", "save", "all")
"""Options of a plan for training that a plan for serving does not take."""
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
"""Arguments of ``add_argument`` for the options that are no settings of a run."""


@dataclass(frozen=True)
class PlanWords:
    """Options of ``tawpipe plan``. The string below a field is its help.

    Args:
        config: settings of the run to plan.
        user_values: values of these settings that the command line and files have given, by path.
        words: values of settings that the command line has given, by key.
        files: files that ``--config`` names.
    """

    config: TrainConfig
    user_values: Mapping[tuple[str, ...], Any]
    words: Mapping[str, Any]
    files: Sequence[str]

    topology: str
    """Machines to plan for: a file of `tawpipe doctor`, a short form such as 3x8@10gbit, or probe for the processes
    that this command is started on."""
    longest: bool
    """Report how long a row may be under every strategy, and what limits it. --sequence-length is then the largest
    length to try. --global-batch is one row for every device by default."""
    serve: bool
    """Plan how to serve --users users with --context tokens each. The plan compares one machine, copies and stages, and
    gives the times of tokens."""
    users: int | None
    """Users who receive tokens at the same time, with --serve."""
    context: int | None
    """Tokens of a user's prompt and answer together, with --serve."""
    weights: str | None
    """Form of the matrices of layers in few bits, with --serve, as in `tawpipe serve` (default: auto)."""
    lengths: str | None
    """Lengths of the documents in a row (default: one document fills it); or of a corpus, whose documents are assigned
    to processes by time. For a corpus: corpus (the documents of --data), a file with a length and its number of
    documents on every line, or a distribution to draw from."""
    memory: float | None
    """Memory of a device in GiB, instead of the memory in the topology."""
    device_name: str | None
    """Device to compute on, if not the device in the topology: H100, A100, CPU, ..."""
    profile: str
    """Source of the costs of blocks: measure (on this machine), estimate (from the device's peak), or auto."""
    all: bool
    """Show every strategy, also those that cannot be the best."""
    json: bool
    """Print JSON only."""
    explain: str | None
    """Show how the time and memory of one candidate are spent."""
    report: str | None
    """File for an HTML page with the comparison and timelines."""
    save: str | None
    """File for the chosen plan, for `tawpipe train --plan FILE`."""

    def user_value(self, name: str) -> Any:
        """Return the value of a top-level setting; None if it is not set, or left open."""
        value = getattr(self.config, name)
        return value if (name,) in self.user_values and not isinstance(value, Open) else None

    @property
    def of_corpus(self) -> bool:
        """True if ``--lengths`` names a corpus instead of the documents of a row."""
        return self.lengths is not None and not re.fullmatch(r"[\d\s,]+", self.lengths)

    @property
    def row(self) -> int | None:
        """Tokens of a row, or None if not set.

        With ``--longest`` only the command line can set it, as a limit on the length.
        """
        return self.user_value("sequence_length") if not self.longest or "sequence_length" in self.words else None

    @property
    def batch(self) -> int | None:
        """Rows of a step, or None if not set.

        With ``--longest`` only the command line can set it; every device gets one row otherwise.
        """
        return self.user_value("global_batch") if not self.longest or "global_batch" in self.words else None

    def located(self, error: UserError) -> UserError:
        """Return ``error`` with the file and line of its setting added, if a file sets it; else unchanged."""
        return train_options().located_in(error, self.files, self.words)

    def check(self) -> None:
        """Raise UserError for options that cannot work or contradict each other. Nothing is loaded for this."""
        config, several = self.config, self.config.micro_batch if self.config.micro_batch > 1 else None
        conflicts: list[tuple[str, Any, str]] = []
        if self.serve:
            values = {**self.words, **vars(self), "all": self.all or None}
            why = "unset with --serve, which trains nothing"
            conflicts.append(("--longest", self.longest or None, "unset with --serve"))
            conflicts += [(option_of(name), values.get(name), why) for name in OF_TRAINING]
            for name in ("users", "context"):
                if values[name] is None:
                    raise UserError(
                        f"--{name}", "nothing", ("a number of users served at once, and of tokens per user")
                    )
        else:
            serve_options = ("users", "context", "weights")
            conflicts += [(f"--{name}", getattr(self, name), "unset without --serve") for name in serve_options]
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
            pack_options = [(f"--{name.replace('_', '-')}", self.user_value(name)) for name in PACK_OPTIONS]
            conflicts += [(name, value, "unset without --lengths of a corpus") for name, value in pack_options]
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
    """Return the schedule settings of a run. ``sequence_ranks`` becomes 1 for a retrieval check with several rows.

    That is: if it is not set, a micro-batch has more than one row, and ``evaluation.retrieval_lengths`` is set."""
    by_row = config.micro_batch > 1 and config.evaluation.retrieval_lengths
    settings = config.schedule
    return replace(settings, sequence_ranks=1) if by_row and settings.sequence_ranks is None else settings


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> PlanWords:
    """Parse the arguments of ``tawpipe plan`` and the files of ``--config``, and return the options.

    Raises:
        UserError: an unknown option or key, a setting of the wrong type, an unreadable file.
        SystemExit: after printing help, if a required option is missing, or if argparse refuses a value or a word.
    """
    options = train_options()
    arguments = vars(parser.parse_args(argv))
    words = {leaf.key: arguments.pop(leaf.key) for leaf in _leaves() if leaf.key in arguments}
    files = arguments.pop("config")
    values = options.values(files, words)
    config = options.build(values)
    if isinstance(config.learning_rate, Open):  # the value has no effect on a plan, but some optimizers need one
        config = replace(config, learning_rate=float(config.learning_rate))
    asked = PlanWords(config, values, words, files, **arguments)
    needed = {"--model": True}
    needed |= dict.fromkeys(
        ("--sequence-length", "--global-batch"), not (asked.longest or asked.serve or asked.of_corpus)
    )
    missing = [name for name, needs in needed.items() if needs and asked.user_value(name[2:].replace("-", "_")) is None]
    for name in missing:
        if (key := name[2:].replace("-", "_"),) in asked.user_values:
            raise UserError(name, getattr(config, key).word, "a number: a plan reads no documents to derive it from")
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return asked


def _leaves() -> list[Leaf]:
    """Return the settings of a training run that ``tawpipe plan`` takes."""
    known = train_options().leaves.values()
    return [leaf for leaf in known if leaf.key in OF_RUN or leaf.path[0] in WHOLE_GROUPS]


def plan_parser() -> argparse.ArgumentParser:
    """Build the parser of ``tawpipe plan``: its own options, and the settings of a training run that a plan uses."""
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
