"""Settings of a training run: names, defaults, meaning.

The string under a field is its help on the command line and in YAML. Names at the top of :class:`TrainConfig` are a
contract; what only experts turn stands in the groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from tawpipe.data.settings import DataSettings
from tawpipe.environment import LaunchEnvironment, started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.model.settings import LoraSettings, RopeSettings
from tawpipe.options import Options, bounded, open_number
from tawpipe.options.command import Values
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.table import strategies
from tawpipe.train.settings.names import ELSEWHERE, LEADING

HALF = "float16 is not supported: its narrow range needs loss scaling"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its learning rate over time and gradient clipping."""

    name: Literal["adamw", "adam", "sgd", "rmsprop", "adafactor", "muon"] = "adamw"
    """One of torch's. adafactor and muon look at whole matrices, which only tawpipe-whole has on one process; a plan
    chooses it then. muon takes the matrices of linear layers; AdamW takes embeddings, head, stacked experts, norms and
    biases."""
    weight_decay: float = bounded(open_number(0.1), minimum=0)
    """Decay of all but vectors (norms and biases, also those stored as tables, and other parameters of one dimension).
    null means by what the run starts from: 0.1 for random weights, else 0."""
    beta1: float = bounded(0.9, minimum=0, below=1)
    """Decay rate of the first moment, of AdamW and Adam."""
    beta2: float = bounded(0.95, minimum=0, below=1)
    """Decay rate of the second moment, of AdamW and Adam."""
    eps: float = bounded(1e-8, above=0)
    """Term in the denominator against division by zero, of AdamW, Adam and RMSprop."""
    momentum: float | None = bounded(None, minimum=0, below=1)
    """Of muon, sgd and rmsprop. null means 0.95, 0.9 and 0."""
    muon_learning_rate: float | None = bounded(None, above=0)
    """Highest learning rate of Muon's matrices, as its author counts. null scales their updates to be as large as those
    of AdamW, so that --learning-rate does for all."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt", "cosine-restarts"] = "cosine"
    """The learning rate after the warm-up: down to its least in a cosine, in a line or in several cosines
    (cosine-restarts), not at all (constant), in the last steps alone (wsd: warm-up, stable, decay), or as one over the
    root of the step (inverse-sqrt)."""
    warmup_steps: int = bounded(open_number(10), minimum=0)
    """Steps over which the learning rate rises linearly from zero. null means by what the run starts from: 10 for
    random weights, else 3 % of the steps."""
    warmup_ratio: float | None = bounded(None, minimum=0, maximum=1)
    """The same as a share of the steps."""
    min_learning_rate_ratio: float = bounded(0.1, minimum=0, maximum=1)
    """Share of --learning-rate below which it does not fall; where a schedule comes down to its end, it ends there."""
    decay_steps: int | None = bounded(None, minimum=0)
    """Steps at the end in which the rate falls under wsd. null means 20 % of the steps."""
    cycles: int | None = bounded(None, minimum=1)
    """Cosines in the run under cosine-restarts. null means 2."""
    clip_norm: float | None = bounded(1.0, minimum=0)
    """Largest global norm of the gradient; null or 0 for no clipping."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Consequence of a loss or gradient norm that is not finite: the end of the run, or a step without an update."""
    skip_limit: int = bounded(10, minimum=1)
    """Steps in a row without an update, beyond which the run ends under skip."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The loss on held-out documents."""

    every: int = bounded(30, minimum=0)
    """Evaluate each time after this many steps, and after the last one. 0 for never."""
    batches: int = bounded(4, minimum=1)
    """Global batches in one evaluation, always the same ones; under --packing balanced so many times the tokens of a
    step."""
    at_start: bool = False
    """Evaluate before the first step of a new run, too: how good the model was that training began with."""
    patience: int = bounded(0, minimum=0)
    """End the run when so many evaluations in a row have not lowered the validation loss. 0 for never."""
    least_gain: float = bounded(0.0, minimum=0)
    """What lowers the validation loss by no more than this counts as nothing for patience."""
    by_position: int = bounded(0, minimum=0)
    """Buckets of positions in a document for which the loss is said besides, up to powers of two and to the row's
    length: a curve that shows how far a model profits from what it has read. 0 for none."""
    retrieval_lengths: list[int] = field(default_factory=list)
    """Lengths in tokens, up to --sequence-length, of rows of held-out text in which a fact is hidden and asked for:
    does the model find it? Empty for no such check."""
    retrieval_depths: int = bounded(5, minimum=1)
    """Depths at which the fact stands in rows of every length, evenly from their beginning to their end."""
    retrieval_samples: int = bounded(4, minimum=1)
    """Facts hidden at every depth, one in a row."""


@dataclass(frozen=True)
class CheckpointConfig:
    """State to resume from, under checkpoints/ in the output folder."""

    every: int = bounded(30, minimum=0)
    """Save each time after this many steps, and after the last one. 0 for never."""
    keep: int = bounded(2, minimum=0)
    """Number of the newest checkpoints that stay on disk. 0 for all."""
    keep_every: int = bounded(0, minimum=0)
    """Checkpoints after multiples of this many steps stay besides. 0 for none."""
    best: bool = False
    """Save after every evaluation with a lower validation loss than any before it. That checkpoint stays besides, and
    it is what is exported in the end."""
    frozen: Literal["reference", "copy"] = "reference"
    """Frozen weights that come from a folder or the Hub. reference: write a hash of each; resuming needs the model.
    copy: write every value."""
    memory_every: int = bounded(0, minimum=0)
    """Each time after this many steps, keep the state in the memory of every process's node and of the next one: after
    the loss of a node, a restart goes on from there. 0 for never."""
    memory_dir: str = "/dev/shm"
    """A file system in memory, for that."""
    background: bool = True
    """Copy the state to the host's memory and write it while training goes on. Off, training waits for the disk."""


@dataclass(frozen=True)
class LogConfig:
    """Files and lines that are written along the way."""

    every: int = bounded(5, minimum=1)
    """Print a line each time after this many steps. metrics.jsonl gets a row for every step."""
    progress: Literal["auto", "off"] = "auto"
    """auto draws a line with a bar at the bottom of a terminal, and prints plain lines elsewhere; off prints plain
    lines everywhere."""
    trackers: list[str] = field(default_factory=lambda: ["none"])
    """Where the numbers of every step go besides metrics.jsonl, which `tawpipe open` shows: tensorboard (files under
    tensorboard/ in the output folder), wandb, mlflow, trackio; none for nowhere. Each needs its library, the extra of
    that name."""
    project: str = ""
    """Project of the run in wandb and trackio, its experiment in mlflow. Empty: what WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME says, or tawpipe."""
    run_name: str = ""
    """Name of the run there. Empty: what WANDB_NAME says, or the name of the output folder."""
    trace_step: int = bounded(0, minimum=0)
    """Take down when everything in this step ran, under traces/ in the output folder, for `tawpipe trace`. 0 for no
    step."""
    straggler: float = bounded(1.3, minimum=0)
    """Say so when a process computes so many times as long as most of them do. 0 for never."""
    spike: float = bounded(8.0, minimum=0)
    """Say so when a loss lies above the median of the last 50 by more than this many times their usual distance from
    it. 0 for never."""


@dataclass(frozen=True)
class ExportConfig:
    """The trained model as a Hugging Face folder, under model/ in the output folder."""

    enabled: bool = True
    """Write it after the last step."""
    merge: bool = False
    """Write the whole model with the adapter in its weights, instead of the adapter alone."""
    format: Literal["hf", "w4a16", "w8a8"] = "hf"
    """Few bits for the matrices of layers, as compressed-tensors has them and vLLM and transformers read them. hf:
    none. w4a16: 4 bits. w8a8: 8 bits, and activations rounded to 8 as it computes."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the exported weights: auto is that of the weights that the run started from, and float32 for random ones
    and for adapters alone."""
    max_shard_mib: int = bounded(4096, minimum=1)
    """Largest safetensors file in MiB, unless one tensor alone is larger."""


@dataclass(frozen=True)
class SampleConfig:
    """Texts that the model writes, on the console and in samples.jsonl in the output folder."""

    prompt: list[str] = field(default_factory=list)
    """The beginning of every text; under chat what a user asks. By default the first words of a document, or the first
    question of a chat, held out if any are."""
    tokens: int = bounded(32, minimum=0)
    """Tokens that the model adds to each. 0 for no samples."""
    every: int = bounded(0, minimum=0)
    """Write them each time after this many steps, and at the end of the run. 0 for at the end alone."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Ask through the chat template of the tokenizer: auto does so where there are chats among the training data."""
    temperature: float = bounded(1.0, minimum=0)
    """How freely tokens are drawn: below 1 likelier ones come more often, 0 always takes the likeliest."""


@dataclass(frozen=True)
class TimeoutConfig:
    """Times for which a process waits for the others before it gives the run up."""

    first_step_s: float = bounded(600.0, above=0)
    """Seconds until the first step is done, and the first evaluation: loading, compilation and the set-up of
    connections are in it. More where step_s says so."""
    step_s: float = bounded(300.0, above=0)
    """Seconds for any step afterwards, or 10 times what a step takes if that is more: by the plan, by those that were
    made, or before any was made by the model's FLOPs. Then every process says what it waits for, and the run ends."""
    save_s: float = bounded(3600.0, above=0)
    """Seconds for writing a checkpoint in the background. Then the run ends."""
    grace_s: float = bounded(120.0, above=0)
    """Seconds that ctrl-C, SIGTERM or SIGUSR1 leave for ending the step and saving, on one machine; then the processes
    are ended. A second one ends them at once."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataSettings):
    """Trains a causal language model: every process keeps its activations, and the weights travel."""

    model: str = "tiny"
    """A preset (tiny), a folder with config.json and optionally safetensors, or a name on the Hugging Face Hub, with
    @REVISION behind it for a branch, tag or commit. Without weights the model starts from random ones."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that are not trained: patterns with *, ? and [...] of whole names of parameters, or of modules that
    hold them, as *.embed_tokens or model.layers.[0-3]."""
    nodes: int | None = bounded(None, minimum=1)
    """Nodes that the processes on this machine are grouped into. null means 1 with GPUs or a model that has weights,
    else 2 if that divides --nproc. Refused under torchrun unless --virtual-nodes is set."""
    nproc: int | None = bounded(None, minimum=1)
    """Processes on this machine, all nodes together. null means one for each GPU; without a GPU 1 for a
    model that has weights, or else 4. Leave it out under torchrun, whose --nproc-per-node says it: torchrun takes an
    --nproc behind -m tawpipe for its own, and may call it ambiguous."""
    virtual_nodes: bool = False
    """Regroup the processes of torchrun into --nodes nodes instead of the machines that they run on."""
    sequence_length: int = bounded(open_number(512, "auto"), minimum=2)
    """Tokens of a row, and of a document at most. Documents are packed into rows and see only themselves. auto means
    512 for random weights. For a model with weights it means the longest document of the data, within the model's
    positions and memory: text at most 4096 tokens or --tokens-per-step, a stream at most 8192. Under --packing balanced
    of no effect where --tokens-per-step and --max-document are set."""
    global_batch: int = bounded(open_number(8), minimum=1)
    """Sequences in a step, over all processes. The same for any number of nodes and processes. null means 8. For a
    model with weights under --sequence-length auto it means the rows that hold 4096 tokens, and at least one for every
    process."""
    micro_batch: int = bounded(1, minimum=1)
    """Sequences that a process computes at one time."""
    tokens_per_step: int | None = bounded(None, minimum=2)
    """Under --packing balanced, the tokens of a step: as many documents as stay within them, over all processes. null
    means --global-batch x --sequence-length where one of them is set, else 4096, or more where a document for every
    process needs more."""
    max_document: int | None = bounded(None, minimum=2)
    """Under --packing balanced, the tokens of a document at most: a longer text is cut into pieces of this length,
    each of which is a document of its own. null means --sequence-length. If this is set, --sequence-length auto means
    this length for a model with weights."""
    bin_tokens: int | None = bounded(None, minimum=2)
    """Under --packing balanced, the tokens that a process computes at one time at most; what it needs of memory
    follows. null means 3/2 of --max-document, or less if that does for one round. A pipeline passes longer documents
    through its stages in slices."""
    steps: int = bounded(open_number(60), minimum=0)
    """Optimizer steps in the whole run, those before a resume included. 0 only evaluates the model: nothing is trained
    and nothing exported. null means --epochs, or by what the run starts from: 60 for random weights, 2 epochs for a
    model with weights, 3 for an adapter."""
    epochs: int | None = bounded(None, minimum=1)
    """Times that the training data is seen, instead of --steps."""
    seed: int = bounded(0, minimum=0)
    """Seed of weights, order of the data and dropout."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = field(
        default="auto", metadata={"refused": dict.fromkeys(("float16", "fp16"), HALF)}
    )
    """Type in which the model computes and in which weights travel: auto is bfloat16 on GPUs that compute in it, else
    float32, and in a resumed run what it was before. Master weights and optimizer state are float32 (float64 under
    float64)."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Form in which the frozen matrices of layers live and travel: 4 bits (nf4, as QLoRA has it) or 8 (int8), with a
    scale for every 64 of them; they are dequantised where a layer computes. none for the type of the run."""
    learning_rate: float = bounded(open_number(2e-3), above=0)
    """Highest learning rate, after the warm-up. null means by what the run starts from: 2e-3 for random weights, 1e-5
    for a model with weights, 2e-4 for an adapter; under adafactor 1e-2, 1e-3 and 1e-2; sgd has none that suits."""
    output: str = "runs/{time}"
    """Folder of everything that the run writes. {time} stands for the date and time of the start."""
    resume: str = "none"
    """none starts anew, auto goes on from the newest complete checkpoint in the output folder (or starts anew if there
    is none), a path goes on from that checkpoint."""
    dry_run: bool = False
    """Check settings, data, model, memory and plan, say what would run, and end: no process is started, no weights are
    loaded, nothing is written into the output folder."""
    plan: str = "auto"
    """Source of the schedule: auto measures the links and the model, predicts every strategy and takes the best, in a
    few seconds, and plans nothing for one process that has memory enough; none takes the settings under schedule; or
    the file that `tawpipe plan --save` wrote. Settings under schedule that are not as usual beat auto. A resumed run
    does on the same nodes what it did before."""
    plan_improve: Literal["on", "off"] = "on"
    """Look for a better order of a pipeline beside the training (under solved): some steps are timed, a solver looks
    for at most a minute, and what it finds is swapped in between two steps. --plan.improve means the same."""
    report: str = ""
    """A file for a page (HTML) about the run when it has ended: plan, curves, the recorded step. Empty for none."""
    max_restarts: int = bounded(0, minimum=0)
    """Times that the processes on one machine are started again after one has died, from the newest sound checkpoint.
    Under torchrun its own --max-restarts does it."""
    deterministic: bool = False
    """Only operations that give the same bits every time, or an error. Costs time on GPUs."""
    check_copies_every: int = bounded(0, minimum=0)
    """Compare what should be alike on several processes after every so many steps, and end the run if it is not. For
    the search for faults. 0 for never."""
    inject: str = ""
    """Faults on purpose, for tests: rank=2,step=7,at=push:3,kind=kill; several with semicolons between them."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model."""
    without_mtp: bool = False
    """Train and export a model without its multi-token-prediction heads (DeepSeek-V3, GLM-4.5, Qwen3.5 and others),
    which are not trained here. Without this setting such a model is refused."""
    check: Literal["auto", "always", "never"] = "auto"
    """Comparison of a few layers with the model's own forward pass before the first step: auto does so for
    models that the project's tests do not cover (docs/models.md). Takes seconds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. auto takes GPUs if there are any."""
    compile: bool = False
    """Compile the layers with torch.compile. The first step takes a minute or more longer."""
    strict: bool = False
    """Check the sequence number and the action of every message. For the search for faults: costs some time."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    rope: RopeSettings = field(default_factory=RopeSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    @property
    def output_path(self) -> Path:
        return Path(self.output)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.tokens_per_step or self.global_batch * self.sequence_length

    @property
    def document_tokens(self) -> int:
        """Tokens that a document, or a piece of one, may have."""
        return self.max_document or self.sequence_length

    @property
    def asks_for_balance(self) -> str:
        """The settings that make sense under ``balanced`` alone and are set, in words."""
        values = {"tokens-per-step": self.tokens_per_step, "max-document": self.max_document}
        return " and ".join(f"--{name}" for name, value in {**values, "bin-tokens": self.bin_tokens}.items() if value)


TAKES = {
    "adamw": ("beta1", "beta2", "eps"),
    "adam": ("beta1", "beta2", "eps"),
    "sgd": ("momentum",),
    "rmsprop": ("momentum", "eps"),
    "adafactor": (),
    "muon": ("momentum", "muon_learning_rate", "beta1", "beta2", "eps"),
}
"""Which settings an optimizer has, by its name."""
SHAPES = {"decay_steps": ("wsd",), "cycles": ("cosine-restarts",)}
"""Which schedules have a setting."""
SETTINGS = "config.yaml"
"""The file in a run's output folder with its settings."""
OF_A_START = {("resume",), ("dry_run",), ("inject",)}
"""Settings that are those of one start, and not of the run."""
OF_A_LAUNCH = {("nodes",), ("nproc",), ("virtual_nodes",)}
"""Settings that are the launcher's where there is one, and may be others on other machines."""
OF_A_MACHINE = {("cache_dir",)}
"""Settings that every machine may have its own value of."""
INSTEAD = {
    ("steps",): ("epochs",),
    ("epochs",): ("steps",),
    ("optimizer", "warmup_steps"): ("optimizer", "warmup_ratio"),
    ("optimizer", "warmup_ratio"): ("optimizer", "warmup_steps"),
    ("tokens_per_step",): ("global_batch",),
}
"""Settings of which one takes the place of the other."""


@cache
def train_options() -> Options[TrainConfig]:
    """The settings of ``tawpipe train``."""
    head = (TrainConfig.__doc__ or "").strip()
    choices = {"schedule.strategy": {name: strategy.summary for name, strategy in strategies().items()}}
    return Options(
        TrainConfig, prog="tawpipe train", description=head, choices=choices, leading=LEADING, elsewhere=ELSEWHERE
    )


def load_config(argv: Sequence[str]) -> TrainConfig:
    """Settings from a command line and the files that it names, and in a run that is gone on with from its folder where
    these say nothing; types are right, values may still be out of range.

    Raises:
        UserError: see :meth:`Options.parse`.
        SystemExit: ``--help`` and ``--print-config``, after printing.
    """
    return train_options().parse(_words(argv), below=_of_the_run)


def saved_settings(config: TrainConfig) -> Path | None:
    """The file with the settings of the run that is gone on with; None if there is none."""
    folder = config.output_path if config.resume == "auto" else Path(config.resume).absolute().parent.parent
    path = folder / SETTINGS
    return path if config.resume != "none" and path.is_file() else None


def changes_of_the_run(config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """What is other than in the run that is gone on with: the option, its value before and now."""
    path, options = saved_settings(config), train_options()
    before = {} if path is None else options.values_in(str(path))
    changes = []
    for place, old in before.items():
        now, leaf = reduce(getattr, place, config), options.leaves[place]
        if place not in OF_A_START and place not in OF_A_LAUNCH and now != old:
            changes.append((leaf.option, old, now))
    return changes


def _of_the_run(config: TrainConfig, given: Values) -> Values:
    """The settings of the run that is gone on with, for all that was not given now."""
    if (path := saved_settings(config)) is None:
        return {}
    left_out = OF_A_START | {place for place in INSTEAD if INSTEAD[place] in given}
    if LaunchEnvironment.read(os.environ) is not None and not started_by_local_launcher():
        left_out |= OF_A_LAUNCH
    saved = train_options().values_in(str(path))
    place = ("output",)
    if place in saved and Path(saved[place]).resolve() != path.parent.resolve():  # the folder was moved
        saved[place] = str(path.parent)
    return {place: value for place, value in saved.items() if place not in left_out}


def located(error: UserError, argv: Sequence[str]) -> UserError:
    """The same error with the file and the line of its setting, if that is from a file that the command line names."""
    return train_options().located(error, _words(argv))


def _words(argv: Sequence[str]) -> list[str]:
    """The words with ``--plan.improve``, which is no group's, as the parser has it; values stay as they are."""
    dotted = "--plan.improve"
    is_option = lambda word: word.partition("=")[0] == dotted  # noqa: E731
    return [word.replace(dotted, "--plan-improve", 1) if is_option(word) else word for word in argv]


def with_output_named(config: TrainConfig, *, now: time.struct_time | None = None) -> TrainConfig:
    """``{time}`` in the output folder's name replaced, by another name than a run has that started in the same second.
    Only one process may do this, or they would disagree.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    ends = chain([stamp], (f"{stamp}-{number}" for number in count(2)))
    names = (config.output.replace("{time}", end) for end in ends)
    return replace(config, output=next(name for name in names if name == config.output or not Path(name).exists()))


def config_text(config: TrainConfig) -> str:
    """The documented YAML of ``config``, which ``--config`` reads back to an equal one."""
    return train_options().to_yaml(config)
