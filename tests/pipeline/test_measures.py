"""What an evaluation measures besides its loss: numbers of the plain model, on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from borders import llama, packed, piped, rows_of, token_sum
from model_families import keep_fp64
from positions import EDGES, LENGTHS, answers, asked_rows, by_position
from states import ALONE
from tawpipe.runtime.compute.measures import LossByPosition


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    keep_fp64(monkeypatch)


def plain(model: Any, seeds: tuple[int, ...]) -> dict[int, tuple[float, int]]:
    """Edge -> the sum of losses and their number, every document by itself and every token one by one."""
    found: dict[int, tuple[float, int]] = dict.fromkeys(EDGES, (0.0, 0))
    for seed in seeds:
        batch, documents = packed([0], LENGTHS, seed=seed)
        for row, first, last in documents:
            ids, labels = (batch[name][row : row + 1, first:last] for name in ("input_ids", "labels"))
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            for before in range(1, last - first):
                if int(labels[0, before]) != -100:
                    loss = float(F.cross_entropy(logits[0, before - 1], labels[0, before]))
                    edge = next(edge for edge in EDGES if before <= edge)
                    total, count = found[edge]
                    found[edge] = (total + loss, count + 1)
    return found


@pytest.mark.parametrize(("chunk", "micro_batch"), [pytest.param(6, 1, marks=pytest.mark.slow), (1000, 2)])
def test_evaluation_loss_by_position_equals_the_plain_model(chunk, micro_batch):
    model = llama()()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch, documents = packed([0], LENGTHS)
    total = tokens = 0
    for row, first, last in documents:  # the step before the evaluation
        ids = batch["input_ids"][row : row + 1, first:last]
        targets = F.pad(batch["labels"][row : row + 1, first + 1 : last], (0, 1), value=-100)
        total += token_sum(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, targets)
        tokens += int((targets != -100).sum())
    (total / tokens).backward()  # type: ignore[union-attr]
    optimizer.step()
    expected = plain(model, (4, 5))

    (curve, said, steps), (_, usual, usual_steps) = by_position(ALONE, chunk=chunk, micro_batch=micro_batch)
    assert (said, steps) == (usual, usual_steps), "the curve has changed what it should only look at"
    assert sum(count for _, count in expected.values()) == sum(tokens for _, tokens in said)
    for edge, (total, count) in expected.items():
        assert curve[str(edge)] == pytest.approx(total / count, rel=1e-9) if count else curve[str(edge)] is None
    whole = sum((curve[str(edge)] or 0) * count for edge, (_, count) in expected.items())
    assert whole == pytest.approx(sum(loss * tokens for loss, tokens in said), rel=1e-9)


def test_evaluation_by_position_sums_over_processes(pool):
    alone = by_position(ALONE, chunk=6, micro_batch=1)
    results = pool.run("positions:by_position", 2, 1, chunk=6, micro_batch=1)
    assert results[0][0][0] == results[1][0][0]
    (curve, said, _), (_, usual, _) = results[0]
    assert said == usual
    assert curve == pytest.approx(alone[0][0], rel=1e-6)  # norms in other processes are in fp32


def test_custom_loss_is_measured_by_position():
    """It is called for the labels of one bucket at a time, and knows nothing of positions."""

    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=0.1
        )

    curve = LossByPosition((4, 16), torch.device("cpu"))
    pipeline = piped(llama(), loss=smoothed)
    result = pipeline.evaluate(rows_of(), measure=curve)
    pipeline.close()
    means, counts = curve.means(ALONE), {"4": 0, "16": 0}
    for row in rows_of()["labels"].tolist():
        for before, label in enumerate(row):
            if before and label != -100:
                counts["4" if before <= 4 else "16"] += 1
    assert sum(counts.values()) == result.tokens
    whole = sum((means[edge] or 0.0) * count for edge, count in counts.items())
    assert whole == pytest.approx(result.loss * result.tokens, rel=1e-9)


@pytest.mark.parametrize(
    ("chunk", "sequence_chunk", "micro_batch"), [(6, 0, 1), (1000, 7, 2), (4, 5, 5)], ids=["short", "cut", "together"]
)
def test_evaluation_answers_equal_the_plain_model(chunk, sequence_chunk, micro_batch):
    knobs = {"loss_chunk_tokens": chunk, "sequence_chunk": sequence_chunk, "micro_batch": micro_batch}
    found, loss, tokens = answers(ALONE, **knobs)
    model = llama()()
    batch = asked_rows(model)
    for row, answer in enumerate(found):
        ids, labels = (batch[name][row : row + 1] for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        assert answer.loss == pytest.approx(float(token_sum(logits[:, :-1], labels[:, 1:])), rel=1e-9)
        assert answer.right == int((logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
        assert answer.tokens == int((labels != -100).sum())
    assert [answer.exact_match for answer in found] == [False, True, False, True, False]
    assert found[4].right == 3
    assert sum(answer.loss for answer in found) == pytest.approx(loss * tokens, rel=1e-9)


@pytest.mark.parametrize("knobs", [{"strategy": "hsdp"}, {"sequence_chunk": 5, "micro_batch": 2}], ids=["whole", "cut"])
def test_evaluation_answers_are_bitwise_equal_on_any_processes(pool, knobs):
    """Of four processes some have more of the rows than others, and cut in micro-batches of two, one has none."""
    results = [pool.run("positions:answers", *shape, loss_chunk_tokens=6, **knobs) for shape in ((1, 1), (2, 2))]
    (alone,), several = results
    assert several[0][0] == alone[0], "the answers are others"
    assert all(rank[0] == several[0][0] for rank in several)
