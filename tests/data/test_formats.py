"""Files, folders and columns: every form in which data sets come, and what is said of what does not fit."""

import contextlib
import csv
import gzip
import json
import random
import re
import shlex
from pathlib import Path

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AddedToken

from chats import learned, tokens_of, with_own
from found_files import find_files
from tawpipe.data.chats.chat import with_template
from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.render import Renderer
from tawpipe.data.encode import Encoder
from tawpipe.data.prepare import prepare_data
from tawpipe.data.reading.hub import load
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import find_sets
from tawpipe.data.report import ReadCounts, Skipped
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenizer import sample_texts, train_tokenizer
from tawpipe.errors import UserError
from tawpipe.train.settings.config import load_config

CHAT = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
SHAREGPT = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]


def rows_of(*entries: object, **settings) -> list[RawRow | Skipped]:
    data = DataSettings(data=[str(entry) for entry in entries], **settings)
    reader = RowReader(Columns.of(data))
    return [row for file in find_files(data.data) for row in reader.read(file)]


def packed(path: Path, text: str) -> None:
    """Write what the file's name says."""
    data = text.encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data[:7]) + gzip.compress(data[7:]))
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(data)
    else:
        path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.csv", "a.tsv", "a.csv.gz", "a.pq"],
)
def test_all_file_formats_give_equal_rows(tmp_path, name):
    rows = [{"prompt": f'say {n},\n"now"', "response": f"naïve {n}"} for n in range(3)]
    path, kind = tmp_path / name, name.split(".")[1]
    if kind == "pq":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind in ("csv", "tsv"):
        plain = tmp_path / "plain"
        with plain.open("w", newline="") as stream:
            table = csv.writer(stream, delimiter="," if kind == "csv" else "\t")
            table.writerows([["prompt", "response"], *(row.values() for row in rows)])
        packed(path, "\ufeff" + plain.read_text())
        plain.unlink()
    else:
        packed(path, json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    found = rows_of(tmp_path)
    assert [row.columns for row in found if isinstance(row, RawRow)] == rows
    assert all(row.where.startswith(str(path)) for row in found)
    assert "say 2" in "".join(sample_texts(find_files([str(path)]), RowReader(), limit=20))


def test_compressed_text_files_are_read(tmp_path):
    for name in ("a.txt", "b.txt.gz", "c.md.zst"):
        packed(tmp_path / name, "naïve")
    assert [row.columns for row in rows_of(tmp_path) if isinstance(row, RawRow)] == [{"text": "naïve"}] * 3


def test_other_files_in_a_folder_of_rows_are_skipped_and_reported_once(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("deep/b.jsonl", "a.jsonl", ".git/c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("words")
    counts, found = ReadCounts(), []
    for row in rows_of(tmp_path):
        if isinstance(row, Skipped):
            counts.add_skipped(row)
        else:
            found.append(row.columns["text"])
    assert found == ["a.jsonl", "deep/b.jsonl"]
    assert counts.lines("training files") == [
        "training files: 2 files left out, other than the files of rows in the folder; the first: "
        f"{tmp_path / 'LICENSE'}"
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="a folder with files in it"):
        find_files([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("name", "content", "where", "why"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "y", "text": "z"}', "line 2", "'text' stands twice"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "line 2", "not UTF-8"),
        ("a.jsonl", b"", "a.jsonl", "without a row"),
        ("a.csv", b"text\n", "a.csv", "without a row"),
        ("a.json", b'[{"text": "x"}, ', "a.json", "neither a list of JSON objects"),
        ("a.csv", b'text,id\nx,1\n"y\nz",2,3\n', "line 3", "3 instead of 2"),
        ("a.csv", b"text\nx\n\xff\n", "line 3", "not UTF-8"),
        ("a.csv", b"text,text\nx,y\n", "a.csv", "two columns of one name"),
        ("a.csv", b"body\nx\n", "line 2", "lacking the columns 'text'"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9], "a.jsonl.gz", "not readable"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", "a.jsonl.zst", "not readable"),
        ("a.pq", b"PAR1", "a.pq, after row 0", "not readable as parquet"),
    ],
)
def test_invalid_rows_and_files_are_named_with_their_place(tmp_path, name, content, where, why):
    (tmp_path / name).write_bytes(content)
    skipped = [row for row in rows_of(tmp_path / name) if isinstance(row, Skipped)]
    assert len(skipped) == 1 and where in skipped[0].where and why in str(skipped[0])


def test_row_kind_follows_from_the_filled_columns(tmp_path):
    """Tables give every row the columns of all."""
    table = [{"text": "x", "messages": None, "prompt": None, "completion": None}]
    table += [
        {**dict.fromkeys(table[0]), "messages": CHAT},
        {**dict.fromkeys(table[0]), "prompt": "a", "completion": "b"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    assert [row.kind for row in rows_of(tmp_path) if isinstance(row, RawRow)] == ["text", "chat", "instruction"]


@pytest.mark.parametrize("wrong", [["body"], ["body=text"], ["text="], ["text=a", "text=b"]])
def test_columns_setting_needs_pairs(wrong):
    with pytest.raises(UserError, match=r"--columns: .*NAME=COLUMN"):
        DataSettings(columns=wrong).check_data()


def test_weights_follow_names_that_may_contain_equals_signs(tmp_path):
    (tmp_path / "year=2024").mkdir()
    for name in ("a.txt", "b.txt", "year=2024/c.txt"):
        (tmp_path / name).write_text(name)
    both, year = [f"{tmp_path}/a.txt=3", f"{tmp_path}/b.txt=1e-1"], f"{tmp_path}/year=2024"
    assert [(one.weight, len(one.files)) for one in find_sets([*both, f"{year}=0.5"])] == [(3, 1), (0.1, 1), (0.5, 1)]
    assert [(one.weight, len(one.files)) for one in find_sets([f"{tmp_path}/*.txt", year])] == [(None, 3)]
    for entries, why in (([*both, year], "for every data set, or for none"), ([f"{both[0][:-1]}0"], "above 0")):
        with pytest.raises(UserError, match=why):
            find_sets(entries)


# Chats

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}\
{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}\
{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}{%- for message in messages %}\
{%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}MARK{%- if loop.last %}\
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{- message.content }}\
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}END{{- '\\n' }}\
{%- elif message.role == 'tool' %}{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}\
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Like Qwen's: tools in the system's turn, answers of tools in one user's turn, thoughts in the last turn."""
MARKED = QWEN.replace("MARK", "{% generation %}").replace("END", "{% endgeneration %}")
UNMARKED = QWEN.replace("MARK", "").replace("END", "")

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
    {"role": "tool", "content": "4", "tool_calls": None},
    {"role": "tool", "content": "IV"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]
SHAREGPT_CALLS = [
    {"from": "human", "value": "Two and two?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
    {"from": "observation", "value": "4"},
    {"from": "observation", "value": "IV"},
    {"from": "gpt", "value": "Four."},
    {"from": "human", "value": "Thanks."},
    {"from": "gpt", "value": "Bye."},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer(["the answer to every question is a number of the house " * 20], 400)
    trained.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")]})
    return trained


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": CALLS, "tools": [{"type": "function", "function": TOOL}]},
        {"messages": json.dumps(CALLS), "tools": json.dumps([TOOL])},
        {"conversations": SHAREGPT_CALLS, "system": "Be brief.", "tools": json.dumps([TOOL])},
    ],
    ids=["messages", "json", "sharegpt"],
)
def test_tool_calls_and_answers_of_a_chat_are_learned(tokenizer, template, row):
    own = with_own(tokenizer, template)
    whole, parts = learned(own, row)
    thought = "<think>\n\n</think>\n\n"
    assert parts == [thought + text + "<|im_end|>" for text in (CALL, "Four.", "Bye.")]
    messages = json.loads(json.dumps(CALLS))
    messages[2] |= {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    tools = [{"type": "function", "function": TOOL}]
    assert whole == own.apply_chat_template(messages, tools=tools, tokenize=False)


def test_generation_marks_of_a_template_give_the_mask_of_transformers(tokenizer):
    own = with_own(tokenizer, MARKED.partition("{%- if add_generation_prompt")[0].replace("loop.last", "false"))
    chat = [one for one in CALLS if one["role"] != "tool" and one["content"]]
    mask = own.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    tokens = tokens_of(Renderer(own), Encoder(own), RawRow("", "chat", {"messages": chat}))
    assert tokens.ids.tolist() == mask["input_ids"] and tokens.counts.tolist() == [
        n == 1 for n in mask["assistant_masks"]
    ]


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_the_named_templates_show_tools_and_learn_calls(tokenizer, name):
    own = with_template(tokenizer, name)
    whole, parts = learned(own, {"messages": CALLS, "tools": [TOOL]})
    end = str(own.eos_token)
    assert end == ("<|im_end|>" if name == "chatml" else "<|endoftext|>")
    assert [part.rstrip("\n") for part in parts] == [CALL + end, "Four." + end, "Bye." + end]
    assert '"description": "Adds."' in whole and whole.count("Be brief.") == 1
    asked = own.apply_chat_template(CALLS[:2], tokenize=False, add_generation_prompt=True)
    assert str(asked).endswith("assistant\n" if name == "chatml" else "<|assistant|>\n")


def test_chatml_is_the_default_template_if_the_tokenizer_has_its_tokens(tokenizer):
    assert learned(tokenizer, {"messages": CHAT})[0].startswith("<|im_start|>user\nTwo")


@pytest.mark.parametrize(
    ("row", "names", "whole", "answer"),
    [
        ({"conversations": SHAREGPT}, (), None, "Four.<|im_end|>"),
        ({"talk": [{"who": "human", "says": "a"}, {"who": "gpt", "says": "b"}]},
         ("messages=talk", "role=who", "content=says"), None, "b<|im_end|>"),
        ({"messages": [{**CHAT[0], "content": [{"text": "Two"}]}, CHAT[1]]}, (), None, "Four.<|im_end|>"),
        ({"prompt": "a", "completion": " b"}, (), "^a b$", " b$"),
        ({"prompt": "a", "response": "b"}, (), "^a\n\nb$", "b$"),
        ({"instruction": "a", "input": "c", "response": "b", "system": "s"}, (), "^s\n\na\n\nc\n\nb$", "b$"),
        ({"question": "a", "answer": "b"}, ("prompt=question", "response=answer"), "^a\n\nb$", "b$"),
        ({"body": "b"}, ("text=body",), "^b$", "b$"),
        ({"text": "^b$"}, (), "^b$", "b$"),
    ],
)  # fmt: skip
def test_columns_become_documents(tokenizer, row, names, whole, answer):
    """^ and $ stand for the tokens that begin and end a text; a text that has them already gets no others."""
    row = {
        key: value.replace("^", "<|endoftext|>").replace("$", "<|endoftext|>") if isinstance(value, str) else value
        for key, value in row.items()
    }
    found, (part,) = learned(tokenizer, row, *names)
    if whole:
        assert found == whole.replace("^", "<|endoftext|>").replace("$", "<|endoftext|>")
    assert part.removeprefix("<|endoftext|>") == answer.replace("$", "<|endoftext|>")


def test_instructions_may_be_rendered_as_chats(tokenizer):
    whole, parts = learned(tokenizer, {"instruction": "a", "input": "c", "output": "b"}, as_chat=True)
    assert whole.startswith("<|im_start|>user\na\nc<|im_end|>") and parts == ["b<|im_end|>"]


def test_left_padding_and_truncation_of_a_tokenizer_change_no_tokens(tokenizer):
    other = with_own(tokenizer, None)
    other.padding_side = other.truncation_side = "left"
    other.model_max_length = 4
    other.backend_tokenizer.enable_padding(direction="left", length=64)
    rows = [RawRow("", "chat", {"messages": CHAT}), RawRow("", "text", {"text": "a number of the house"})]
    for row in rows:
        expected, found = (tokens_of(Renderer(one), Encoder(one), row) for one in (tokenizer, other))
        assert expected.ids.tolist() == found.ids.tolist() and expected.counts.tolist() == found.counts.tolist()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"messages": [{"role": "gpt4", "content": "x"}, CHAT[1]]},
            "with an unknown role .expected system, user.*'gpt4'",
        ),
        ({"messages": [{"role": "user"}, CHAT[1]]}, "whose content is neither a text nor.*message 1: null"),
        ({"messages": [{"user": "x"}]}, r"message 1 has \['user'\]"),
        ({"messages": [CHAT[0]]}, "without an assistant's turn"),
        ({"messages": None}, "without an assistant's turn"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [7]}]}, "no name and arguments"),
        ({"messages": CHAT, "tools": "add"}, "whose tools are no list"),
        ({"prompt": None, "completion": None}, "without an answer"),
        ({"prompt": "x", "completion": 7}, "whose column 'completion' holds no text.*int"),
    ],
)
def test_malformed_rows_are_skipped_with_their_reason(tokenizer, row, why):
    raw = Columns().row("a.jsonl, line 3", row)
    assert isinstance(raw, RawRow)
    (skipped,) = Renderer(tokenizer).render(raw)
    assert isinstance(skipped, Skipped) and skipped.where == "a.jsonl, line 3"
    assert re.search(why, str(skipped))


def test_tools_and_turns_that_a_template_leaves_out_are_reported(tokenizer):
    simple = with_own(
        tokenizer,
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}",
    )
    for row, why in (
        ({"messages": CHAT, "tools": [TOOL]}, "with tools, which"),
        ({"messages": [*CALLS[1:3], *CALLS[6:]]}, "with tool calls, which"),
        ({"messages": [CALLS[0], *CHAT]}, "with a turn that the chat template leaves out"),
    ):
        *_, skipped = Renderer(simple).render(RawRow("here", "chat", row))
        assert isinstance(skipped, Skipped) and why in skipped.why


def test_unusable_chat_template_is_refused(tokenizer, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    for name in ("nowhere.jinja", str(tmp_path / "broken.jinja")):
        with pytest.raises(UserError, match="--chat-template"):
            with_template(tokenizer, name, "--chat-template")


# The page on data

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = re.findall(r"^\| [^|]+ \| `(\{.*?\})` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize(("row", "answers"), EXAMPLES)
def test_examples_of_the_data_page_learn_the_answers_listed_beside_them(tokenizer, row, answers):
    _, parts = learned(tokenizer, json.loads(row))
    found = [re.sub("<.(endoftext|im_end).>", "", part).rstrip("\n").replace("\n", " ") for part in parts]
    assert found == re.findall("`(.*?)`", answers) and len(EXAMPLES) > 8


def test_commands_of_the_data_page_find_their_data(tokenizer, tmp_path, monkeypatch):
    """The data of each, on small files and a folder in the place of the Hub's data set."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{n} is a number of the house" for n in range(40)]
    for name in ("more", "corpus", "hub"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "hub" / "test.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:9]))
    packed(tmp_path / "corpus" / "a.txt.gz", texts[0])
    chats = [{"messages": [CHAT[0], {**CHAT[1], "content": text}]} for text in texts]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "questions.csv").write_text("\n".join(["question,answer", *(f"{text}?,{text}" for text in texts)]))
    (tmp_path / "small-model").mkdir()
    tokenizer.save_pretrained(tmp_path / "small-model")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    places = {"org/name": "hub"}
    for name in ("load_dataset", "load_dataset_builder"):
        real = getattr(datasets, name)
        monkeypatch.setattr(datasets, name, lambda path, *args, real=real, **more: real(places[path], *args, **more))
    load.cache_clear()
    reports = []
    for command in re.findall(r"^tawpipe train (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        config = load_config([*shlex.split(command), "--cache-dir", "cache"])
        if config.data == ["chats/*.jsonl"]:
            continue
        data = prepare_data(config, sequence_length=64, seed=0, model=config.model)
        reports.append("\n".join(data.report.lines()))
        assert data.train.sample(3).tokens and data.report.read.documents
    assert len(reports) == 5
    assert "hf:org/name: 20.0% of the tokens, " in reports[-1]
    assert not any("left out" in report for report in reports[1:-1])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_prompt_and_completion_may_be_messages_in_json_text(tokenizer, tmp_path, name):
    row = {"prompt": json.dumps(CHAT[:1]), "completion": json.dumps([CHAT[1]])}
    written = pandas.DataFrame([row]).to_csv(index=False) if name == "a.csv" else json.dumps(row)
    (tmp_path / name).write_text(written)
    (raw,) = RowReader(Columns()).read(find_files([str(tmp_path / name)])[0])
    assert isinstance(raw, RawRow)
    _, parts = learned(tokenizer, raw.columns)
    assert parts == learned(tokenizer, {"messages": CHAT})[1]
    code = {"prompt": '{"a": 1, "a": 2}', "completion": '[{"a": 1}]'}
    assert learned(tokenizer, code)[1] == ['[{"a": 1}]<|endoftext|>']


def test_truncated_or_padded_gzip_file_gives_the_rows_that_gzip_reads(tmp_path):
    lines = "".join(json.dumps({"text": f"{number} {random.Random(number).random()}"}) + "\n" for number in range(999))
    whole = gzip.compress(lines.encode(), mtime=0)
    for name, content in (("cut", whole[:-4000]), ("padded", whole + bytes(64))):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        rows = [row for row in RowReader(Columns()).read(find_files([str(path)])[0]) if isinstance(row, RawRow)]
        expected = []
        with contextlib.suppress(EOFError), gzip.open(path, "rt") as stream:
            expected.extend(line for line in stream if line.endswith("\n"))
        assert len(rows) == len(expected) > 500
