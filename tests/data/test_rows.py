"""Text, chat and instruction rows: what counts in the loss, and what is refused or skipped by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chats import documents_of, encoded
from found_files import find_files
from tawpipe.data.chats.chat import ChatText
from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.encode import PART_CHARACTERS, Encoder, split_text
from tawpipe.data.reading.read import RowReader
from tawpipe.data.report import Skipped
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the answer to every question is a number of the house " * 20], 400)


def with_template(tokenizer, template):
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    other.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    other.chat_template = template
    return other


def counted_text(tokenizer, kind, **columns) -> tuple[str, str]:
    """The whole row as text, and the text of its tokens that count."""
    tokens = encoded(Encoder(tokenizer), documents_of(Renderer(tokenizer), RawRow("here", kind, columns)))
    return tokenizer.decode(tokens[0].ids), "".join(tokenizer.decode(each.ids[each.counts]) for each in tokens[::-1])


def test_only_the_completion_of_an_instruction_row_is_learned(tokenizer):
    whole, counted = counted_text(tokenizer, "instruction", prompt="the question is", completion=" a number")
    assert counted == " a number<|endoftext|>"
    assert whole == "<|endoftext|>the question is a number<|endoftext|>"


def test_prompt_border_within_a_word_is_kept(tokenizer):
    assert counted_text(tokenizer, "instruction", prompt="the ques", completion="tion")[1] == "tion<|endoftext|>"


def test_only_the_output_column_of_an_instruction_row_is_learned(tokenizer):
    columns = {"instruction": "Add.", "input": "2 2", "output": "4"}
    assert counted_text(tokenizer, "instruction", **columns) == (
        "<|endoftext|>Add.\n\n2 2\n\n4<|endoftext|>",
        "4<|endoftext|>",
    )
    assert counted_text(tokenizer, "instruction", instruction="Add.", input=None, output="4")[0].count("\n\n") == 1


def test_only_assistant_turns_of_a_chat_are_learned(tokenizer):
    whole, counted = counted_text(tokenizer, "chat", messages=CHAT)
    assert counted == "Four.<|endoftext|>Seven.<|endoftext|>"
    assert whole.startswith("<|system|>\nBe brief.\n<|user|>\nTwo and two?\n<|assistant|>\nFour.<|endoftext|>\n")


def test_chat_template_of_the_tokenizer_is_used(tokenizer):
    whole, counted = counted_text(with_template(tokenizer, CHATML), "chat", messages=CHAT)
    assert counted == "Four.<|im_end|>Seven.<|im_end|>"
    assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)


def test_template_that_rewrites_turns_learns_every_answer_as_prompted(tokenizer):
    _, counted = counted_text(with_template(tokenizer, THINKING), "chat", messages=CHAT)
    assert counted == "".join(f"<think>\n\n</think>\n\n{number}.<|im_end|>" for number in ("Four", "Seven"))


def test_only_the_completion_of_message_lists_is_learned(tokenizer):
    _, counted = counted_text(tokenizer, "instruction", prompt=CHAT[:4], completion=CHAT[4:])
    assert counted == "Seven.<|endoftext|>"


def test_pieces_are_joined_without_the_prefix_space_of_the_tokenizer():
    vocabulary = {
        token: n for n, token in enumerate(["<unk>", "▁", "\n", "▁ab", "ab", "▁cd", "cd", "a", "b", "c", "d"])
    }
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "d"), ("▁", "ab"), ("▁", "cd")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    document = Document("instruction", (ChatText("ab", False), ChatText("cd", True)))
    (tokens,) = Encoder(tokenizer).encode([document])
    assert tokenizer.convert_ids_to_tokens(tokens.ids.tolist()) == ["▁ab", "cd"]
    assert tokens.counts.tolist() == [False, True]


@pytest.mark.parametrize(
    ("kind", "columns", "reason"),
    [
        ("text", {"text": None}, "empty"),
        ("text", {"text": " \n"}, "empty"),
        ("text", {"text": 7}, "row"),
        ("text", {"text": "half \ud800"}, "row"),
        ("chat", {"messages": []}, "empty"),
        ("chat", {"messages": CHAT[:2]}, "empty"),
        ("chat", {"messages": "hello"}, "row"),
        ("chat", {"messages": [{"role": "user"}]}, "row"),
        ("instruction", {"prompt": "x", "completion": ""}, "empty"),
    ],
)
def test_rows_with_missing_or_wrong_values_are_skipped(tokenizer, kind, columns, reason):
    (found,) = Renderer(tokenizer).render(RawRow("line 3", kind, columns))
    assert isinstance(found, Skipped) and found.kind == reason and found.where == "line 3"


def test_long_texts_are_split_before_a_space_without_loss(tokenizer):
    words = "word and more words " * (PART_CHARACTERS // 8)
    parts = list(split_text(words))
    assert "".join(parts) == words and len(parts) > 2
    assert all(len(part) <= PART_CHARACTERS for part in parts) and all(part[0] == " " for part in parts[1:])
    unbroken = "x" * (2 * PART_CHARACTERS + 1)
    assert [len(part) for part in split_text(unbroken)] == [PART_CHARACTERS, PART_CHARACTERS, 1]
    (whole,) = Encoder(tokenizer).encode([Document("text", (ChatText(words, True),))])
    assert np.array_equal(whole.ids[1:-1], tokenizer(words, add_special_tokens=False)["input_ids"])


def read(path: Path, rows: Any = "auto", **names: str) -> list[RawRow | Skipped]:
    reader = RowReader(Columns(rows, names))
    return [row for file in find_files([str(path)]) for row in reader.read(file)]


def test_corrupt_line_is_named_and_other_lines_are_read(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one"}\n{"text": \n\n"text"\n{"text": "\xff"}\n{"text": "two"}')
    rows = read(file)
    assert [row.columns["text"] for row in rows if isinstance(row, RawRow)] == ["one", "two"]
    assert [row.where for row in rows if isinstance(row, Skipped)] == [f"{file}, line {n}" for n in (2, 4, 5)]


def test_json_list_is_read_like_json_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, 3, {"text": "two"}]))
    kinds = [type(row) for row in read(tmp_path / "a.json")]
    assert kinds == [RawRow, Skipped, RawRow]


def test_a_text_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    (skipped,) = read(tmp_path / "a.txt")
    assert isinstance(skipped, Skipped) and skipped.where.endswith("a.txt") and "UTF-8" in skipped.why


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (skipped,) = read(tmp_path / "gone.txt")
    assert isinstance(skipped, Skipped) and skipped.kind == "file" and "not readable" in skipped.why


def test_parquet_rows_are_read_and_a_broken_file_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "messages": [CHAT, CHAT[:3]]}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    assert [row.kind for row in rows if isinstance(row, RawRow)] == ["chat", "chat"]
    assert isinstance(rows[1], RawRow) and rows[1].columns == {"messages": CHAT[:3]}
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    (skipped,) = read(tmp_path / "b.parquet")
    assert isinstance(skipped, Skipped) and "b.parquet" in skipped.where


@pytest.mark.parametrize(
    ("columns", "rows", "names", "kind"),
    [
        (["text"], "auto", {}, "text"),
        (["body", "messages"], "auto", {"text": "body"}, "text"),
        (["text", "messages"], "auto", {}, "chat"),
        (["text", "conversations"], "auto", {}, "chat"),
        (["text", "messages"], "text", {}, "text"),
        (["prompt", "completion", "text"], "auto", {}, "instruction"),
        (["prompt", "response", "text"], "auto", {}, "instruction"),
        (["question", "answer", "text"], "auto", {"prompt": "question", "response": "answer"}, "instruction"),
        (["instruction", "output", "messages"], "instruction", {}, "instruction"),
    ],
)
def test_row_kind_follows_from_its_columns(tmp_path, columns, rows, names, kind):
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(columns, "x")))
    (row,) = read(tmp_path / "a.jsonl", rows, **names)
    assert isinstance(row, RawRow) and row.kind == kind


@pytest.mark.parametrize("rows", ["auto", "text", "chat", "instruction"])
def test_rows_without_expected_columns_are_skipped_and_columns_are_named(tmp_path, rows):
    (tmp_path / "a.jsonl").write_text('{"content": "x", "id": 1}\n')
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"], "id": [1]}), tmp_path / "b.parquet")
    for file, kind in (("a.jsonl", "row"), ("b.parquet", "file")):
        (skipped,) = read(tmp_path / file, rows)
        assert isinstance(skipped, Skipped) and skipped.kind == kind
        assert skipped.detail == "it has ['content', 'id']" and "--columns" in skipped.why


def test_a_glob_that_matches_nothing_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    missing = str(tmp_path / "*.md")
    with pytest.raises(UserError) as caught:
        find_files([str(tmp_path / "*.txt"), missing])
    assert caught.value.setting == "--data" and caught.value.value == missing


def test_files_are_sorted_and_read_once(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    files = find_files([str(tmp_path / "*.txt"), str(tmp_path / "**/*")])
    assert [Path(file.path).name for file in files] == ["a.txt", "b.txt"]


def test_folders_behind_links_are_searched_once(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "real", elsewhere / "deep"):
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text("{}")
    for link, target in {"again": "real", "loop": ".", "other": elsewhere, ".hidden": elsewhere}.items():
        (data / link).symlink_to(target)
    (elsewhere / "deep" / "back").symlink_to(elsewhere)
    found = [Path(file.path).relative_to(data) for file in find_files([str(data)])]
    assert found == [Path("other/deep/rows.jsonl"), Path("real/rows.jsonl")]
