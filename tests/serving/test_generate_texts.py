"""Texts from the model in training: right, and nothing of training changes."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import VOCABULARY, llama
from every_family import random_model
from served_families import prompts
from states import ALONE, everything, make, same, train
from tawpipe import CheckSettings, Pipeline, UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.pipeline.steps import Continuation
from tawpipe.serving.generate import DrawnTokens, Wanted, by_evaluation
from tawpipe.serving.passes import Sampling

PROMPTS = [[id % VOCABULARY for id in ids] for ids in prompts()]


def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    ids = list(ids)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_pipeline_generate_equals_greedy_decoding() -> None:
    plain = llama(torch.float64)
    with closing(Pipeline(llama(torch.float64), dtype=torch.float64, world=ALONE)) as pipeline:
        texts = pipeline.generate(PROMPTS, 6, temperature=0.0)
        assert [[*ids, *text.ids] for ids, text in zip(PROMPTS, texts, strict=True)] == [
            greedy(plain, ids, 6) for ids in PROMPTS
        ]
        stop = texts[1].ids[2]
        ended = pipeline.generate(PROMPTS, 6, temperature=0.0, stops=[stop])[1].ids
        assert ended == texts[1].ids[: texts[1].ids.index(stop) + 1]
        assert pipeline.generate(PROMPTS, 0) == [Continuation((), ())] * 3
        assert pipeline.generate([], 3) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_logprobs_equal_an_evaluation(dtype: torch.dtype) -> None:
    with closing(Pipeline(llama(torch.float32), dtype=dtype, world=ALONE)) as pipeline:
        (text,) = pipeline.generate(PROMPTS[1:2], 12, seed=3, top_k=20)
        ids = torch.tensor([[*PROMPTS[1], *text.ids]])
        labels = ids.clone()
        labels[0, : len(PROMPTS[1])] = IGNORE
        result = pipeline.evaluate({"input_ids": ids, "labels": labels})
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert -sum(text.logprobs) / len(text.logprobs) == pytest.approx(result.loss, abs=limit)


def test_generation_leaves_later_training_unchanged() -> None:
    with closing(make()) as plain, closing(make()) as pipeline:
        losses = train(plain) + train(plain)
        others = train(pipeline)
        before = torch.get_rng_state()
        pipeline.generate(PROMPTS, 5, seed=1)
        assert torch.equal(torch.get_rng_state(), before)
        others += train(pipeline)
        assert losses == others and same(everything(plain), everything(pipeline))


def test_parameters_are_placeholders_again_after_generation() -> None:
    with closing(make()) as pipeline:
        pipeline.generate(PROMPTS, 2)
        assert all(bool(parameter.isnan().all()) for parameter in pipeline.chain.model.parameters())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompts": [[]]}, "prompts"),
        ({"prompts": [[VOCABULARY]]}, "prompts"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_impossible_generation_arguments_are_refused(given: dict[str, Any], expected: str) -> None:
    with closing(make()) as pipeline, pytest.raises(UserError) as caught:
        pipeline.generate(**{"prompts": PROMPTS, "max_tokens": 3, **given})
    assert caught.value.setting == expected


@pytest.mark.parametrize("knobs", [{}, pytest.param({"strategy": "hsdp"}, marks=pytest.mark.slow)])
def test_generation_on_two_processes_equals_greedy_decoding(pool: Any, knobs: dict[str, Any]) -> None:
    results = pool.run("generating:generated", 2, 1, prompts=PROMPTS, **knobs)
    plain = llama(torch.float64)
    expected = [greedy(plain, ids, 6)[len(ids) :] for ids in PROMPTS]
    assert results == [(expected, True)] * 2


# by an evaluation for every token


@pytest.mark.parametrize("family", ["bloom", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_generation_without_batching_equals_greedy_decoding(family: str) -> None:
    """Documents in turn, and mixers."""
    plain = random_model(family).eval()
    with closing(
        Pipeline(random_model(family), dtype=torch.float64, world=ALONE, checks=CheckSettings(check="never"))
    ) as pipeline:
        texts = pipeline.generate(prompts(), 4, temperature=0.0)
    assert [[*ids, *text.ids] for ids, text in zip(prompts(), texts, strict=True)] == [
        greedy(plain, ids, 4) for ids in prompts()
    ]


class Counting:
    """As much of a pipeline as an evaluation needs, and a model that says the number after the last one it has seen."""

    world = ALONE
    vocabulary = 20

    def __init__(self, spread: float = 0.0) -> None:
        self.chain: Any = SimpleNamespace(logits=self._logits)
        self.spread = spread

    def _logits(self, hidden: Tensor) -> Tensor:
        following = torch.nn.functional.one_hot((hidden[..., 0].long() + 1) % self.vocabulary, self.vocabulary)
        return following.float() * (1.0 if self.spread else 50.0)

    def part_of(self, rows: int, sequence_length: int, row: Any) -> list[MicroBatch]:
        return [row(number) for number in range(rows)]

    def evaluate(self, batch: list[MicroBatch], *, measure: Any) -> None:
        for number, part in enumerate(batch):
            head = measure.head(self.chain, part, number)
            for begin in range(0, part.labels.shape[1], 5):  # in chunks
                cut = slice(begin, begin + 5)
                head(part.input_ids[:, cut, None].double(), part.labels[:, cut], cut)


def texts(pipeline: Counting, asked: list[list[int]], stops: tuple[int, ...] = (), **settings: Any) -> list[list[int]]:
    tokens = settings.pop("tokens", 4)
    wanted = Wanted(asked, tokens, Sampling(**{"temperature": 0.0, **settings}), frozenset(stops))
    written = by_evaluation(pipeline, wanted)
    return [[*ids, *new.ids] for ids, new in zip(asked, written, strict=True)]


def test_text_continues_with_the_most_likely_token_until_its_end() -> None:
    assert texts(Counting(), [[3], [7, 9], [18]]) == [[3, 4, 5, 6, 7], [7, 9, 10, 11, 12, 13], [18, 19, 0, 1, 2]]
    assert texts(Counting(), [[3], [7, 9]], stops=(5, 10)) == [[3, 4, 5], [7, 9, 10]]
    assert texts(Counting(), [[3]], tokens=0) == [[3]]


def test_generated_text_depends_only_on_its_seed() -> None:
    alone = texts(Counting(0.5), [[1]], temperature=1.0, tokens=12, seed=3)
    assert texts(Counting(0.5), [[1], [2]], temperature=1.0, tokens=12, seed=3)[0] == alone[0]
    assert texts(Counting(0.5), [[1]], temperature=1.0, tokens=12, seed=4) != alone


def test_drawn_tokens_ignores_positions_without_a_request() -> None:
    measure, labels = DrawnTokens([(1, Sampling()), (3, Sampling(temperature=0.0))]), torch.full((1, 4), IGNORE)
    labels[0, 2] = 1
    batch = MicroBatch(torch.tensor([[5, 6, 7, 8]]), labels, torch.arange(4)[None], (4,))
    head = measure.head(Counting().chain, batch, 0)
    assert head(batch.input_ids[..., None].double(), labels, slice(0, 4)) == 0
    assert {number: token for number, (token, _) in measure.of(ALONE).items()} == {1: 8}
