"""Settings of a training run: names, defaults and help texts.

The string under a field is its help on the command line and in YAML. The names at the top level of :class:`TrainConfig`
are a contract and stay stable; settings for experts are in the groups.
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
from tawpipe.model.settings import ExpertSettings, LoraSettings, RopeSettings
from tawpipe.options import Options, bounded, open_number
from tawpipe.options.command import Values
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.table import strategies
from tawpipe.train.settings.names import ELSEWHERE, LEADING

HALF = "float16 is not supported: its narrow range needs loss scaling"


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate over time and gradient clipping."""

    name: Literal["adamw", "adam", "sgd", "rmsprop", "adafactor", "muon"] = "adamw"
    """Optimizer, as implemented in torch. adafactor and muon need whole matrices: on several processes only
    tawpipe-whole keeps a matrix on one process, and a plan then chooses it. muon trains the matrices of linear layers;
    AdamW then trains embeddings, head, stacked experts, norms and biases."""
    weight_decay: float = bounded(open_number(0.1), minimum=0)
    """Weight decay. It applies to matrices, not to vectors: norms and biases, also if they are stored as tables, and
    other parameters of one dimension do not decay. null means 0.1 for random weights, else 0."""
    beta1: float = bounded(0.9, minimum=0, below=1)
    """Decay rate of the first moment in AdamW and Adam."""
    beta2: float = bounded(0.95, minimum=0, below=1)
    """Decay rate of the second moment in AdamW and Adam."""
    eps: float = bounded(1e-8, above=0)
    """Term that avoids division by zero in AdamW, Adam and RMSprop."""
    momentum: float | None = bounded(None, minimum=0, below=1)
    """Momentum of muon, sgd and rmsprop. null means 0.95 for muon, 0.9 for sgd and 0 for rmsprop."""
    muon_learning_rate: float | None = bounded(None, above=0)
    """Highest learning rate of Muon's matrices, in the scale of Muon's author. null scales Muon's updates to the size
    of AdamW's updates, so that --learning-rate serves all parameters."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt", "cosine-restarts"] = "cosine"
    """Learning rate after the warm-up. cosine and linear fall to the lowest rate along one cosine or one line, and
    cosine-restarts along several cosines. constant does not fall. wsd (warm-up, stable, decay) falls in the last steps
    only. inverse-sqrt falls as one over the square root of the step."""
    warmup_steps: int = bounded(open_number(10), minimum=0)
    """Steps of the warm-up, in which the learning rate rises linearly from zero. null means 10 for random weights, else
    3 % of the steps."""
    warmup_ratio: float | None = bounded(None, minimum=0, maximum=1)
    """Warm-up as a share of all steps, instead of warmup_steps."""
    min_learning_rate_ratio: float = bounded(0.1, minimum=0, maximum=1)
    """Lowest learning rate, as a share of --learning-rate. Schedules that fall until the end of the run end there."""
    decay_steps: int | None = bounded(None, minimum=0)
    """Steps at the end of the run in which the rate falls under wsd. null means 20 % of the steps."""
    cycles: int | None = bounded(None, minimum=1)
    """Number of cosines in the run under cosine-restarts. null means 2."""
    clip_norm: float | None = bounded(1.0, minimum=0)
    """Largest global norm of the gradient. null or 0 means no clipping."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient norm that is not finite: stop ends the run, skip leaves out the update of this
    step."""
    skip_limit: int = bounded(10, minimum=1)
    """Largest number of consecutive steps without an update under skip. One more ends the run."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of the loss on held-out documents."""

    every: int = bounded(30, minimum=0)
    """Evaluate after every N steps, and after the last step. 0 means never."""
    batches: int = bounded(4, minimum=1)
    """Global batches in one evaluation; they are the same ones every time. Under --packing balanced, the size of an
    evaluation in multiples of the tokens of a step."""
    at_start: bool = False
    """Evaluate before the first step of a new run, too. This shows how good the model was before training."""
    patience: int = bounded(0, minimum=0)
    """End the run after N consecutive evaluations that have not lowered the validation loss. 0 means never."""
    least_gain: float = bounded(0.0, minimum=0)
    """Smallest decrease of the validation loss that counts as an improvement for patience."""
    by_position: int = bounded(0, minimum=0)
    """Number of ranges of positions in a document for which the loss is also reported; their upper ends are powers of
    two and the row's length. The curve shows how much a model gains from earlier text. 0 means none."""
    retrieval_lengths: list[int] = field(default_factory=list)
    """Lengths in tokens, up to --sequence-length, of the rows in a retrieval check. Each row is held-out text with a
    hidden fact and a question about it; the check counts the facts that the model finds. Empty means no check."""
    retrieval_depths: int = bounded(5, minimum=1)
    """Number of depths at which facts are hidden in rows of every length, evenly from the beginning to the end."""
    retrieval_samples: int = bounded(4, minimum=1)
    """Number of facts at every depth, each in a row of its own."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints to resume from, under checkpoints/ in the output folder."""

    every: int = bounded(30, minimum=0)
    """Save a checkpoint after every N steps, and after the last step. 0 means never."""
    keep: int = bounded(2, minimum=0)
    """Number of newest checkpoints to keep on disk. 0 keeps all."""
    keep_every: int = bounded(0, minimum=0)
    """Keep also the checkpoints after multiples of N steps. 0 means none."""
    best: bool = False
    """Save a checkpoint after every evaluation with the lowest validation loss so far. It is kept in addition to the
    newest ones, and the final export uses its weights."""
    frozen: Literal["reference", "copy"] = "reference"
    """Storage of frozen weights that were read from a folder or the Hub. reference writes only a hash of each; to
    resume, the model must still be there. copy writes all values."""
    memory_every: int = bounded(0, minimum=0)
    """Copy the state every N steps into the memory of each process's node and of the next node. After the loss of a
    node, a restart resumes from these copies. 0 means never."""
    memory_dir: str = "/dev/shm"
    """Folder on a file system in memory, for the copies of memory_every."""
    background: bool = True
    """Copy the state to CPU memory and write it while training continues. false makes training wait for the disk."""


@dataclass(frozen=True)
class LogConfig:
    """Lines and files that report the progress of a run."""

    every: int = bounded(5, minimum=1)
    """Print a line after every N steps. metrics.jsonl gets a row for every step."""
    progress: Literal["auto", "off"] = "auto"
    """Progress bar. auto draws a bar at the bottom of a terminal, and prints plain lines elsewhere; off prints plain
    lines everywhere."""
    trackers: list[str] = field(default_factory=lambda: ["none"])
    """Experiment trackers that receive the numbers of every step: tensorboard (files under tensorboard/ in the output
    folder), wandb, mlflow, trackio, or none. Each needs its library, which the extra of this name installs.
    metrics.jsonl, which `tawpipe open` shows, is always written."""
    project: str = ""
    """Project of the run in wandb and trackio, and its experiment in mlflow. Empty means the value of WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME, else tawpipe."""
    run_name: str = ""
    """Name of the run in the trackers. Empty means the value of WANDB_NAME, else the name of the output folder."""
    trace_step: int = bounded(0, minimum=0)
    """Step to record: the time of every action is written under traces/ in the output folder, for `tawpipe trace`. 0
    means no step."""
    straggler: float = bounded(1.3, minimum=0)
    """Report a process whose computing time, relative to its work, exceeds the median of all processes by this factor.
    0 means never."""
    spike: float = bounded(8.0, minimum=0)
    """Report a loss that lies above the median of the last 50 losses by more than N times their median distance from
    it. 0 means never."""


@dataclass(frozen=True)
class ExportConfig:
    """Export of the trained model as a Hugging Face folder, under model/ in the output folder."""

    enabled: bool = True
    """Write the model after the last step."""
    merge: bool = False
    """Write the whole model with the adapter merged into its weights, instead of the adapter alone."""
    format: Literal["hf", "w4a16", "w8a8"] = "hf"
    """Format of the matrices of layers. hf keeps the exported type; w4a16 stores 4 bits; w8a8 stores 8 bits, and
    activations are rounded to 8 bits during computing. The last two are formats of compressed-tensors, which vLLM and
    transformers read."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the exported weights. auto means the type of the weights that the run started from, and float32 for
    random weights and for an adapter alone."""
    max_shard_mib: int = bounded(4096, minimum=1)
    """Largest size of a safetensors file, in MiB. A file with one larger tensor may exceed it."""


@dataclass(frozen=True)
class SampleConfig:
    """Sample texts that the model writes, on the console and in samples.jsonl in the output folder."""

    prompt: list[str] = field(default_factory=list)
    """Prompts, one for each text; under chat each is a question of a user. By default one prompt from the data,
    held-out data if there is any: the first words of a document, or the first question of a chat."""
    tokens: int = bounded(32, minimum=0)
    """Number of tokens that the model adds to each prompt. 0 means no samples."""
    every: int = bounded(0, minimum=0)
    """Write samples after every N steps, and at the end of the run. 0 means at the end only."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Apply the tokenizer's chat template to prompts. auto does so if the training data contains chats."""
    temperature: float = bounded(1.0, minimum=0)
    """Sampling temperature. Below 1, likelier tokens are drawn more often; 0 always takes the likeliest token."""


@dataclass(frozen=True)
class TimeoutConfig:
    """Time limits after which a process stops waiting for other processes and ends the run."""

    first_step_s: float = bounded(600.0, above=0)
    """Seconds for the first step and the first evaluation, which include loading, compilation and the set-up of
    connections. The limit is longer if a step takes longer (see step_s)."""
    step_s: float = bounded(300.0, above=0)
    """Seconds for any later step, or 10 times the duration of a step if that is longer. The duration is taken from the
    plan and from finished steps, or before the first step from the model's FLOPs. After this time every process reports
    what it waits for, and the run ends."""
    save_s: float = bounded(3600.0, above=0)
    """Seconds for writing a checkpoint in the background. After this time the run ends."""
    grace_s: float = bounded(120.0, above=0)
    """Seconds to finish the step and save after ctrl-C, SIGTERM or SIGUSR1, on one machine. After this time the
    processes are ended. A second signal ends them at once."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataSettings):
    """Train a causal language model. Every process keeps its activations, and the weights travel between processes."""

    model: str = "tiny"
    """Model to train: a preset (tiny), a folder with config.json and optionally safetensors, or a name on the Hugging
    Face Hub. @REVISION behind a Hub name selects a branch, tag or commit. Without weights the model starts from random
    values."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that are not trained, as patterns with *, ? and [...]. A pattern matches whole names of parameters, or
    of modules that contain them: *.embed_tokens or model.layers.[0-3]."""
    nodes: int | None = bounded(None, minimum=1)
    """Number of nodes that the processes on this machine are grouped into. null means 1 with GPUs or with a model that
    has weights, else 2 if that divides --nproc. Not allowed under torchrun, unless --virtual-nodes is set."""
    nproc: int | None = bounded(None, minimum=1)
    """Number of processes on this machine, over all nodes. null means one for each GPU; without a GPU, 1 for a model
    that has weights and 4 for random weights. Leave it out under torchrun, where --nproc-per-node sets it: torchrun
    takes an --nproc behind -m tawpipe for its own, and may call it ambiguous."""
    virtual_nodes: bool = False
    """Group the processes of torchrun into --nodes nodes, instead of by the machines that they run on."""
    sequence_length: int = bounded(open_number(512, "auto"), minimum=2)
    """Tokens of a row, and of a document at most. Documents are packed into rows, and tokens attend to their own
    document only. auto means 512 for random weights. For a model with weights auto means the longest document of the
    data, within the model's positions and memory: text at most 4096 tokens or --tokens-per-step, a stream at most 8192.
    Under --packing balanced it has no effect if --tokens-per-step and --max-document are set."""
    global_batch: int = bounded(open_number(8), minimum=1)
    """Sequences in a step, over all processes. It does not depend on the number of nodes and processes. null means 8.
    For a model with weights under --sequence-length auto, null means the rows that hold 4096 tokens, and at least one
    for every process."""
    micro_batch: int = bounded(open_number(1, "auto"), minimum=1)
    """Sequences that a process computes at one time. auto takes as many as fill the device, within memory and within
    the process's share of a step: about 16384 tokens on a GPU, 512 on a CPU. auto is 1 where another number would
    change results: with dropout, and with a loss that balances experts."""
    tokens_per_step: int | None = bounded(None, minimum=2)
    """Tokens of a step under --packing balanced, over all processes: a step takes documents until one more would exceed
    this number. null means --global-batch x --sequence-length if one of them is set, else 4096, or more if one document
    for every process needs more."""
    max_document: int | None = bounded(None, minimum=2)
    """Largest number of tokens of a document under --packing balanced. A longer text is cut into pieces of this length,
    and each piece is a document of its own. null means --sequence-length. If this is set, --sequence-length auto means
    this length for a model with weights."""
    bin_tokens: int = bounded(open_number(0, "auto"), minimum=2)
    """Largest number of tokens that a process computes at one time under --packing balanced (a packed micro-batch). It
    determines the memory that the process needs. auto means 3/2 of --max-document, within memory at least as many
    tokens as fill the device (see micro_batch), or less if less is enough to compute a step in one round. A pipeline
    passes longer documents through its stages in slices."""
    steps: int = bounded(open_number(60), minimum=0)
    """Optimizer steps of the whole run, including steps before a resume. 0 only evaluates the model: nothing is
    trained, and nothing is exported. null means --epochs; without --epochs, 60 steps for random weights, 2 epochs for a
    model with weights, and 3 epochs for an adapter."""
    epochs: int | None = bounded(None, minimum=1)
    """Number of passes over the training data, instead of --steps."""
    seed: int = bounded(0, minimum=0)
    """Seed of random weights, of the order of the data and of dropout."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = field(
        default="auto", metadata={"refused": dict.fromkeys(("float16", "fp16"), HALF)}
    )
    """Type in which the model computes and weights travel. auto means bfloat16 on GPUs that support it, else float32; a
    resumed run keeps its type. Master weights and optimizer state are float32, or float64 under float64."""
    quantize: Literal["auto", "none", "nf4", "int8", "published"] = "auto"
    """Form in which the frozen matrices of layers are stored and travel. nf4 uses 4 bits, as in QLoRA; int8 uses 8
    bits; both have one scale for every 64 values, and are dequantised where a layer computes. published keeps the codes
    and scales of a model's folder in FP8, MXFP4, nf4 or compressed-tensors, without a second rounding. none keeps the
    type of the run. auto means published for a frozen base whose folder has such codes, otherwise none."""
    learning_rate: float = bounded(open_number(2e-3), above=0)
    """Highest learning rate, reached at the end of the warm-up. null means 2e-3 for random weights, 1e-5 for a model
    with weights and 2e-4 for an adapter; under adafactor 1e-2, 1e-3 and 1e-2. sgd has no default: set a value."""
    output: str = "runs/{time}"
    """Folder for all files that the run writes. {time} stands for the date and time of the start."""
    resume: str = "none"
    """Checkpoint to resume from: none (start a new run), auto (the newest complete one in the output folder), or its
    path. auto starts a new run if the folder has no checkpoint."""
    dry_run: bool = False
    """Check settings, data, model, memory and plan, print what would run, and exit. No process is started, no weights
    are loaded, and nothing is written into the output folder."""
    plan: str = "auto"
    """Source of the schedule. auto measures the links and the model, predicts every strategy and takes the fastest, in
    a few seconds; for one process with enough memory it plans nothing. none uses the settings under schedule. A file
    that `tawpipe plan --save` wrote is used as it is. If a setting under schedule that a plan would choose differs from
    its default, auto makes no plan and uses the settings. Exceptions are sequence_chunk, sequence_ranks, host_homes and
    device_speeds: auto keeps their values and plans the others. A resumed run on the same nodes uses its earlier
    schedule."""
    plan_improve: Literal["on", "off"] = "on"
    """Search for a better order of a pipeline during training, under solved. Some steps are timed, a solver then
    searches for at most a minute, and a better order replaces the current one between two steps. --plan.improve is
    another name for this option."""
    report: str = ""
    """HTML file to write at the end of the run, with plan, curves and the recorded step. Empty means none."""
    max_restarts: int = bounded(0, minimum=0)
    """Number of times that the processes on one machine are started again after one has died, from the newest intact
    checkpoint. Under torchrun use its own --max-restarts."""
    deterministic: bool = False
    """Use only operations that give the same bits every time, and raise an error for others. Slower on GPUs."""
    check_copies_every: int = bounded(0, minimum=0)
    """Compare the copies of data that several processes hold after every N steps, and end the run if they differ. For
    debugging. 0 means never."""
    inject: str = ""
    """Faults to cause on purpose, for tests: rank=2,step=7,at=push:3,kind=kill. Semicolons separate several faults."""
    trust_remote_code: bool = False
    """Run Python code that is part of a model's repository."""
    without_mtp: bool = False
    """Train and export the model without its multi-token-prediction heads (DeepSeek-V3, GLM-4.5, Qwen3.5 and others),
    which tawpipe does not train. Without this setting such a model is refused."""
    check: Literal["auto", "always", "never"] = "auto"
    """Comparison of a few layers with the model's own forward pass before the first step; it takes seconds. auto does
    so for models that the project's tests do not cover (docs/models.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. auto uses GPUs if there are any."""
    kernels: Literal["eager", "fused", "auto"] = "auto"
    """Kernels for the norms, rotary embeddings and gates of layers. eager: the model's own code. fused: Liger's, on
    GPUs with liger-kernel, for the parts of the model that compute the same as those; they are compared before the
    first step. auto: fused on devices on which a committed result shows that it is faster, else eager."""
    compile: bool = False
    """Compile the layers with torch.compile. The first step takes a minute or more longer."""
    strict: bool = False
    """Check the sequence number and the action of every message between processes. For debugging; it costs some
    time."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    rope: RopeSettings = field(default_factory=RopeSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    experts: ExpertSettings = field(default_factory=ExpertSettings)
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
        """Number of tokens of a step, over all processes."""
        return self.tokens_per_step or self.global_batch * self.sequence_length

    @property
    def document_tokens(self) -> int:
        """Largest number of tokens of a document, or of a piece of a cut document."""
        return self.max_document or self.sequence_length

    @property
    def asks_for_balance(self) -> str:
        """Options that the user has set and that only ``balanced`` uses, as text; ``""`` if none is set."""
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
"""Settings that each optimizer uses."""
SHAPES = {"decay_steps": ("wsd",), "cycles": ("cosine-restarts",)}
"""Schedules that use a setting."""
SETTINGS = "config.yaml"
"""File with the settings of a run, in its output folder."""
OF_A_START = {("resume",), ("dry_run",), ("inject",)}
"""Settings that belong to one start only; a resumed run does not take them from the saved settings."""
OF_A_LAUNCH = {("nodes",), ("nproc",), ("virtual_nodes",)}
"""Settings that a launcher such as torchrun decides, and that may differ between machines."""
OF_A_MACHINE = {("cache_dir",)}
"""Settings that may have another value on every machine."""
INSTEAD = {
    ("steps",): ("epochs",),
    ("epochs",): ("steps",),
    ("optimizer", "warmup_steps"): ("optimizer", "warmup_ratio"),
    ("optimizer", "warmup_ratio"): ("optimizer", "warmup_steps"),
    ("tokens_per_step",): ("global_batch",),
}
"""Setting -> settings that replace it: if one of these is given, the saved value of the setting is not used."""


@cache
def train_options() -> Options[TrainConfig]:
    """Return the options of ``tawpipe train``, made from the fields of ``TrainConfig``; the result is cached."""
    head = (TrainConfig.__doc__ or "").strip()
    choices = {"schedule.strategy": {name: strategy.summary for name, strategy in strategies().items()}}
    return Options(
        TrainConfig, prog="tawpipe train", description=head, choices=choices, leading=LEADING, elsewhere=ELSEWHERE
    )


def load_config(argv: Sequence[str]) -> TrainConfig:
    """Read settings from a command line, from the files that it names, and from the folder of the run that it resumes.

    The command line beats the files, and both beat the saved settings of the resumed run. Types are checked; values may
    still be out of range.

    Raises:
        UserError: see :meth:`Options.parse`.
        SystemExit: after ``--help`` or ``--print-config`` has printed.
    """
    return train_options().parse(_words(argv), below=_of_the_run)


def saved_settings(config: TrainConfig) -> Path | None:
    """Return the path of the saved settings of the run that ``config`` resumes; None if there is none."""
    folder = config.output_path if config.resume == "auto" else Path(config.resume).absolute().parent.parent
    path = folder / SETTINGS
    return path if config.resume != "none" and path.is_file() else None


def changes_of_the_run(config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ from the resumed run, each as (option, earlier value, new value).

    Settings of one start and of a launch are not compared.
    """
    path, options = saved_settings(config), train_options()
    before = {} if path is None else options.values_in(str(path))
    changes = []
    for place, old in before.items():
        now, leaf = reduce(getattr, place, config), options.leaves[place]
        if place not in OF_A_START and place not in OF_A_LAUNCH and now != old:
            changes.append((leaf.option, old, now))
    return changes


def _of_the_run(config: TrainConfig, values: Values) -> Values:
    """Return the saved settings of the run that ``config`` resumes, for use below the settings that were given.

    Args:
        config: settings from the command line and its files.
        values: values that were values there; a saved setting that one of them replaces is left out.

    If the run's folder was moved, ``output`` is the new folder.
    """
    if (path := saved_settings(config)) is None:
        return {}
    left_out = OF_A_START | {place for place in INSTEAD if INSTEAD[place] in values}
    if LaunchEnvironment.read(os.environ) is not None and not started_by_local_launcher():
        left_out |= OF_A_LAUNCH
    saved = train_options().values_in(str(path))
    place = ("output",)
    if place in saved and Path(saved[place]).resolve() != path.parent.resolve():  # the user has moved the folder
        saved[place] = str(path.parent)
    return {place: value for place, value in saved.items() if place not in left_out}


def located(error: UserError, argv: Sequence[str]) -> UserError:
    """Return ``error`` with the file and line of its setting if a file on the command line ``argv`` sets it.

    Otherwise ``error`` is returned unchanged."""
    return train_options().located(error, _words(argv))


def _words(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``--plan.improve`` replaced by ``--plan-improve``; ``plan`` is no group of settings."""
    dotted = "--plan.improve"
    is_option = lambda word: word.partition("=")[0] == dotted  # noqa: E731
    return [word.replace(dotted, "--plan-improve", 1) if is_option(word) else word for word in argv]


def with_output_named(config: TrainConfig, *, now: time.struct_time | None = None) -> TrainConfig:
    """Return ``config`` with ``{time}`` in the output folder's name replaced by the date and time.

    A number is added if a folder of this name exists. Only one process may call this, as several could choose different
    names.

    Args:
        now: time to use; None for the current time.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    ends = chain([stamp], (f"{stamp}-{number}" for number in count(2)))
    names = (config.output.replace("{time}", end) for end in ends)
    return replace(config, output=next(name for name in names if name == config.output or not Path(name).exists()))


def config_text(config: TrainConfig) -> str:
    """Return ``config`` as YAML with comments; ``--config`` reads it back to an equal ``TrainConfig``."""
    return train_options().to_yaml(config)
