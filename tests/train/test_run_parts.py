"""What a run is made of, by itself: its batches, its optimizer, its samples, its saves and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from schedules import llama, make
from tawpipe.checkpoint.save import Saved
from tawpipe.console import Console
from tawpipe.data.tokenizer import stops_of, train_tokenizer
from tawpipe.dealing.balance import LayerKind, LayerTime, Pack, Packs
from tawpipe.dealing.lengths import in_like_lengths
from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.discovery.discovery import PositionUse
from tawpipe.plan.cost.predict import Needs
from tawpipe.runtime.homes.storage import PlaceOfPiece
from tawpipe.runtime.world import World
from tawpipe.topology import Topology
from tawpipe.train.batches import Batches
from tawpipe.train.judging.sample import Samples
from tawpipe.train.run import _same_tokens
from tawpipe.train.saves import LOOK_EVERY, Saves
from tawpipe.train.saying.words import MEMORY_PARTS, batch_words, gib, memory_rows, step_rows, without_effect
from tawpipe.train.settings.checks import validate
from tawpipe.train.settings.config import TAKES, TrainConfig, load_config
from tawpipe.train.settings.decided import BatchShape
from tawpipe.train.settings.optimizers import factory_of
from tawpipe.train.start import typical_lengths

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)


# batches


class Rows:
    """A source of rows that are their numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def length(self, number: int) -> int:
        return 1 + 7 * number % 10

    def sample(self, number: int) -> int:
        return number


class Parts:
    """As much of a pipeline as batches need: it is given all rows."""

    world = ALONE

    def part_of(self, rows: int, length: int, sample: Any) -> list[int]:
        return [sample(place) for place in range(rows)]


def batches(*words: str, rows: int = 50) -> tuple[Any, Rows]:
    config = load_config(["--global-batch", "4", "--micro-batch", "2", "--sequence-length", "16", *words])
    source: Any = Rows(rows)
    data: Any = SimpleNamespace(train=source, report=SimpleNamespace(streamed=False))
    pipeline: Any = Parts()
    shape = BatchShape.of(config, config.packing, 1)
    return Batches(shape, pipeline, data, model=config.model, evaluated=config.evaluation.batches), source


def test_train_batches_continue_from_any_first_sample() -> None:
    made, _ = batches()
    given = list(made.train(6, 3))
    assert [row for one in given for row in one.batch] == list(range(6, 18))
    assert [(one.samples, one.tokens) for one in given] == [(4, 64)] * 3
    made.close()


def test_single_document_rows_are_grouped_by_length() -> None:
    made, source = batches("--packing", "none")
    (given,) = made.train(0, 1)
    lengths = [source.length(row) for row in range(4)]
    assert given.batch == in_like_lengths(lengths, 2) and sorted(given.batch) == [0, 1, 2, 3]
    groups = [given.batch[:2], given.batch[2:]]
    assert given.tokens == sum(2 * max(lengths[row] for row in group) for group in groups) < 2 * 2 * max(lengths)


@pytest.mark.parametrize(("rows", "expected"), [(3, [3]), (9, [4, 4]), (50, [4, 4, 4])])
def test_no_held_out_row_is_evaluated_twice(rows: int, expected: list[int]) -> None:
    made, _ = batches("--evaluation.batches", "3")
    source: Any = Rows(rows)
    found = list(made.validation(source))
    assert [len(one) for one in found] == expected
    assert [row for one in found for row in one] == list(range(sum(expected)))
    assert list(made.validation(source)) == found


# the optimizer


@pytest.mark.parametrize("name", TAKES)
def test_every_optimizer_receives_the_options_of_the_settings(name: str) -> None:
    words = ["--learning-rate", "0.003", "--optimizer.name", name, "--optimizer.weight-decay", "0.25"]
    given = {"beta1": 0.7, "beta2": 0.8, "eps": 1e-5, "momentum": 0.6}
    for option in TAKES[name]:
        if option in given:
            words += [f"--optimizer.{option}", str(given[option])]
    parameters = [PlaceOfPiece("layer.weight", (4, 6), 0).mark(torch.zeros(4, 6))]
    made: Any = factory_of(load_config(words))(parameters)  # type: ignore[arg-type]
    made = made if isinstance(made, list | tuple) else [made]
    (group,) = [group for one in made for group in one.param_groups if group["params"]]
    assert group["lr"] == 0.003 or name == "muon"
    assert group["weight_decay"] == 0.25
    if "betas" in group:
        assert tuple(group["betas"]) == (0.7, 0.8)
    if name in ("sgd", "rmsprop", "muon"):
        assert group["momentum"] == 0.6
    if "eps" in TAKES[name] and name != "muon":
        assert group["eps"] == 1e-5


# samples


def test_a_run_keeps_its_tokenizer(tmp_path: Path) -> None:
    """One that is trained again, on other files, may have as many tokens, under other numbers."""
    first, other = (train_tokenizer([text], 270) for text in ("the cat sat on the mat", "a zebra hid in the zoo"))
    assert _same_tokens(first, tmp_path), "nothing is known of it"
    first.save_pretrained(tmp_path)
    assert _same_tokens(first, tmp_path) and not _same_tokens(other, tmp_path)


def test_sample_prompt_may_be_empty_but_must_be_utf8() -> None:
    validate(load_config(["--sample.prompt"]))  # as by default: the beginning of a document
    with pytest.raises(UserError, match=r"--sample\.prompt: got 'caf\\udce9'; text in UTF-8"):
        validate(load_config(["--sample.prompt", "good", "caf\udce9"]))


def test_data_is_not_read_for_a_prompt_if_no_samples_are_written(tmp_path: Path) -> None:
    class Chats:
        tokenizer = SimpleNamespace(eos_token_id=2)
        report = SimpleNamespace(read=SimpleNamespace(chat=1))

        @property
        def some_text(self) -> list[MicroBatch]:
            raise AssertionError

    config = SimpleNamespace(get_text_config=SimpleNamespace)
    chain = SimpleNamespace(model=None, config=config, positions=PositionUse())
    pipeline, data = cast(Any, SimpleNamespace(chain=chain, world=ALONE)), cast(Any, Chats())
    config = load_config(["--sample.tokens", "0"]).sample
    Samples(config, Console(1), pipeline, data, folder=tmp_path, window=8, seed=0, first=0)


def test_sample_stops_are_those_of_tokenizer_and_model() -> None:
    tokenizer = SimpleNamespace(eos_token_id=2)
    assert stops_of(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[9, 2])), tokenizer) == [2, 9]
    assert stops_of(SimpleNamespace(), SimpleNamespace(eos_token_id=None)) == []


# saves


@dataclass
class Save:
    """A save that ends when it is told so."""

    problem: str = ""
    staged_s: float = 0.0
    done: bool = False
    waited: list[float | None] = field(default_factory=list)

    def wait(self, limit_s: float | None = None) -> Saved:
        self.waited.append(limit_s)
        self.done = True
        return Saved(Path("step"), self.staged_s, 0.0, self.problem)


@dataclass
class Saver:
    """As much of a pipeline as saves need."""

    saves: list[Save]
    started: list[tuple[object, int]] = field(default_factory=list)
    world: Any = field(default_factory=lambda: SimpleNamespace(gather_numbers=lambda value: [value, 1.0]))

    def start_saving(self, store: object, *, run: dict[str, int], limit_s: float, copy_frozen: bool) -> Save:
        assert not copy_frozen
        self.started.append((store, run["step"]))
        return self.saves[len(self.started) - 1]


@dataclass
class State:
    step: int


def saves(*under_way: Save, memory: object = None, **checkpoint: Any) -> tuple[Saves, Saver, list[str]]:
    said: list[str] = []
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(**{"background": True, "memory_every": 5, "frozen": "reference", **checkpoint}),
        timeouts=SimpleNamespace(save_s=60.0),
    )
    pipeline: Any = Saver(list(under_way))
    console: Any = SimpleNamespace(notice=said.append)
    state: Any = State
    return Saves(config, console, pipeline, "disk", memory, state), pipeline, said  # type: ignore[arg-type]


def test_save_waits_for_the_previous_one_and_reports_its_failure() -> None:
    first, second = Save("No space left", staged_s=0.5), Save(staged_s=0.25)
    made, pipeline, said = saves(first, second)
    made.after(3, save=True)
    assert not first.waited and made.step == 3
    made.after(4, save=False)
    made.after(7, save=True)
    assert first.waited == [60.0] and made.unsaved == "No space left" and "training continues without it" in said[0]
    made.finish()
    assert pipeline.started == [("disk", 3), ("disk", 7)] and second.waited and made.unsaved == ""
    assert made.stall_s == 0.25 and made.step == 7


def test_running_save_is_polled_without_waiting() -> None:
    made, _, _ = saves(one := Save(staged_s=0.1))
    made.after(1, save=True)
    made.after(LOOK_EVERY, save=False)
    assert not one.waited and made.stall_s is None  # it still runs on this rank
    one.done = True
    made.after(LOOK_EVERY + 1, save=False)
    assert not one.waited
    made.after(2 * LOOK_EVERY, save=False)
    assert one.waited and made.stall_s == 0.1


def test_foreground_save_ends_before_the_next_step() -> None:
    made, _, _ = saves(one := Save(), background=False)
    made.after(1, save=True)
    assert one.waited


def test_memory_checkpoints_are_made_at_their_own_steps() -> None:
    copies = [Save("no room"), Save()]
    made, pipeline, said = saves(*copies, memory="memory")
    for step in range(1, 11):
        made.after(step, save=False)
    assert pipeline.started == [("memory", 5), ("memory", 10)] and "no copy in memory before step 10" in said[0]
    made.finish()
    assert copies[1].waited


# words


def test_bytes_are_spelled_in_gib_or_mib() -> None:
    assert [gib(2**30), gib(2**30 - 2**20), gib(0)] == ["1.00 GiB", "1023.0 MiB", "0.0 MiB"]


def test_link_settings_without_effect_on_one_node_are_listed() -> None:
    config = load_config(["--schedule.weights-compression", "int8", "--schedule.step-cache", "2"])
    assert sorted(without_effect(config.schedule, ALONE)) == ["step_cache", "weights_compression"]
    assert without_effect(config.schedule, World(Topology.grid(2, 1), 0, torch.device("cpu"), None)) == []
    assert without_effect(TrainConfig().schedule, ALONE) == []


def test_step_rows_describe_the_batch_and_links_between_nodes() -> None:
    config = load_config(["--global-batch", "8", "--micro-batch", "2", "--sequence-length", "128"])
    batch = BatchShape.of(config, "split", 4)
    assert batch_words(batch, None, None) == "8 sequences x 128 tokens, micro-batches of 2"
    for nodes in (1, 2):
        schedule = make(llama(3), nodes, 2, 8)
        said: Any = SimpleNamespace(
            strategy="s", schedule="t", link_sent_bytes=[2**20 * 3, 2**20 * 5], link_received_bytes=[2**20 * 4, 0]
        )
        rows = dict(step_rows(said, schedule.topology, "full"))
        assert rows["strategy"] == "s: t, recompute full" and ("network" in rows) == (nodes == 2)
    assert rows["network"] == "5.0 MiB sent and 4.0 MiB received per node and step"


def test_batch_description_names_packs_for_pipelines_and_rounds_otherwise() -> None:
    batch = BatchShape.of(load_config(["--max-document", "200", "--tokens-per-step", "800"]), "balanced", 2)
    whole, parts = (Pack((1, 2)),), [(Pack((0,), part=span),) for span in ((0, 6), (6, 9))]
    dealt = Packs((), (whole, whole), 1, (9, 3, 3), LayerTime((LayerKind(1, 1.0, 0.0),)))
    assert "3 documents in 2 rounds, packed micro-batches of at most 300 tokens per process" in batch_words(
        batch, dealt, None
    )
    piped = replace(dealt, single=(*parts, whole), positions=2, slices=((2,),))
    words = "3 documents in 3 packed micro-batches per pipeline (2 slices of long documents in all), packed "
    assert words in batch_words(batch, piped, None) and "round" not in batch_words(batch, piped, None)


def test_plan_is_requested_for_full_packs_despite_longer_documents() -> None:
    words = ["--bin-tokens", "60", "--max-document", "200", "--tokens-per-step", "600", "--schedule.strategy", "1f1b"]
    train = SimpleNamespace(step=lambda *_: SimpleNamespace(lengths=[20, 171, 30, 9]))
    data: Any = SimpleNamespace(train=train, longest=200, report=SimpleNamespace(streamed=True))
    assert sum(typical_lengths(data, BatchShape.of(load_config(words), "balanced", 2))) == 60


def test_memory_rows_list_every_part_and_the_host() -> None:
    rows = dict(memory_rows(Needs({"homes": 2**31, "working": 2**20, "kept": 2**22}, 0)))
    assert rows["memory"] == "2.00 GiB per process at most" and "host memory" not in rows
    parts = rows[MEMORY_PARTS]
    assert parts.startswith("2.00 GiB weights, gradients, optimizer state; 1.0 MiB while a layer")
    assert "4.0 MiB at most" in parts
    rows = dict(memory_rows(Needs({"homes": 2**31}, 2**32, 2**33)))
    assert rows["host memory"].startswith("4.00 GiB per node") and rows["files"].startswith("8.00 GiB per node")
