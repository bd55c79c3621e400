"""Lines before the first step: a warning if much is left out, and one of the first documents with its learned text."""

import json
import re
from typing import Any

import pytest
from tokenizers import processors

from chat_families import byte_level
from tawpipe.data.prepare import prepare_data
from tawpipe.data.settings import DataSettings
from tawpipe.dealing.lengths import LengthLimits

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GOOD = [{"role": "user", "content": "Two\nand two?"}, {"role": "assistant", "content": "It is\nfour."}]
BAD = {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]}


def report_of(tmp_path, rows, tokenizer=None, length: int | LengthLimits = 512, **settings):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"validation_fraction": 0.0, "packing": "none", "cache_dir": str(tmp_path / "cache")} | settings
    data = DataSettings(**{"data": [str(tmp_path / "a.jsonl")], **given})
    tokenizer = tokenizer or byte_level(TEMPLATE, ["<|end|>"], eos_token="<|end|>")
    return prepare_data(data, sequence_length=length, seed=0, tokenizer=tokenizer).report


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("bad", "empty", "warns"), [(1, 0, False), (2, 0, True), (1, 1, True), (0, 1, False)])
def test_warning_reports_more_than_a_tenth_of_rows_left_out(tmp_path, streaming, bad, empty, warns):
    rows = [BAD] * bad + [{"messages": GOOD[:1]}] * empty + [{"messages": GOOD}] * (10 - bad - empty)
    warnings = report_of(tmp_path, rows, streaming=streaming).warnings
    assert len(warnings) == warns
    for warning in warnings:
        assert warning.startswith("left out 2 of 10 rows, ") and "a.jsonl, line 1" in warning


@pytest.fixture
def two():
    """A tokenizer that begins a text with two tokens of which none is its begin-of-text token, as GLM's does."""
    tokenizer = byte_level(TEMPLATE, ["<|end|>", "[gMASK]", "<sop>"], eos_token="<|end|>")
    special = [(name, tokenizer.get_vocab()[name]) for name in ("[gMASK]", "<sop>")]
    begun = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = begun
    return tokenizer


@pytest.mark.parametrize("before", [0, 3])
def test_report_shows_a_first_document_with_learned_text_marked(tmp_path, two, before):
    """Texts before it are learned whole."""
    report = report_of(tmp_path, [{"text": "All of it."}] * before + [{"messages": [*GOOD, *GOOD]}], two)
    head, *lines = report.example_lines()
    assert head.startswith("first document")
    text = "\n".join(line.removeprefix("  ") for line in lines)
    whole = two.apply_chat_template([*GOOD, *GOOD], tokenize=False)
    assert text.replace(">>>", "").replace("<<<", "") == f"[gMASK]<sop>{whole}"
    assert re.findall(r">>>(.*?)<<<", text, re.DOTALL) == ["It is\nfour.<|end|>"] * 2
    assert max(map(len, report.example_lines(8))) < 120


def test_text_with_two_begin_tokens_is_cut_as_text_not_as_chat(tmp_path, two):
    """Texts are cut at the tokens of a step, and chats are not."""
    limits = LengthLimits(9000, "the model's positions", 4096)
    report = report_of(tmp_path, [{"text": "x" * 6000}, {"messages": GOOD}], two, length=limits)
    assert (report.sequence_length, report.why_length) == (4096, "the tokens of a step; 1 document is longer")
    assert any("chat template without [gMASK]<sop>: added to" in line for line in report.lines())


def test_longest_chat_sets_the_row_length_beside_a_longer_text(tmp_path, two):
    long_chat = [GOOD[0], {"role": "assistant", "content": "x" * 5000}]
    limits = LengthLimits(9000, "the model's positions", 4096)
    report = report_of(tmp_path, [{"text": "x" * 6000}, {"messages": long_chat}], two, length=limits)
    assert report.sequence_length > 5000 and report.why_length == "the longest chat; 1 document is longer"


@pytest.mark.parametrize("of_validation", [False, True])
def test_small_data_set_with_many_rows_left_out_is_named(tmp_path, of_validation):
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [BAD, BAD, {"messages": GOOD}]))
    other = str(tmp_path / "b.jsonl")
    data = [f"{tmp_path / 'a.jsonl'}=0.9", f"{other}=0.1"]
    beside: Any = {"validation_data": [other]} if of_validation else {"data": data}
    (warning,) = report_of(tmp_path, [{"messages": GOOD}] * 200, **beside).warnings
    assert warning.startswith("left out 2 of 3 rows, ") and "b.jsonl, line 1" in warning


def test_chats_cut_at_the_length_limit_are_counted(tmp_path, two):
    limits = LengthLimits(300, "the model's positions", 4096)
    chats = [{"messages": [GOOD[0], {"role": "assistant", "content": "x" * size}]} for size in (400, 500, 10)]
    report = report_of(tmp_path, chats, two, length=limits)
    assert report.sequence_length == 300
    said = "2 chats were longer than 300 tokens (the model's positions)"
    assert report.why_length == f"the model's positions; {said}"


def test_stream_in_split_rows_holds_out_the_documents_of_the_files(tmp_path, two):
    limits = LengthLimits(300, "the model's positions", 4096)
    chats = [{"messages": [*GOOD, GOOD[0], {"role": "assistant", "content": str(n) * 200}]} for n in range(60)]
    sizes = [
        report_of(tmp_path, chats, two, length=length, packing="split", streaming=streaming, validation_fraction=0.3)
        for length in (limits, 300)
        for streaming in (False, True)
    ]
    held_out = [report.validation.documents if report.validation else 0 for report in sizes]
    assert len(set(held_out)) == 1 and not any("cut at turns" in line for report in sizes for line in report.lines())


def test_report_names_the_setting_that_bounds_a_document(tmp_path):
    long_chat = {"messages": [GOOD[0], {"role": "assistant", "content": "x" * 400}]}
    packing: Any
    for most, packing, name in ((300, "balanced", "--max-document"), (None, "none", "--sequence-length")):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [long_chat, {"messages": GOOD}]))
        data = DataSettings(data=[str(tmp_path / "a.jsonl")], packing=packing, cache_dir=str(tmp_path / "cache"))
        tokenizer = byte_level(TEMPLATE, ["<|end|>"], eos_token="<|end|>")
        read = prepare_data(data, sequence_length=300, max_document=most, seed=0, tokenizer=tokenizer)
        assert any(f"exceed 300 tokens ({name})" in line for line in read.report.lines())
