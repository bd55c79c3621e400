"""Every column and field of a chat or instruction row is learned, shown, refused by name, or said once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from chats import with_own
from found_files import find_files
from tawpipe.data.chats.columns import Columns
from tawpipe.data.chats.render import AS_CHAT, Document, Renderer
from tawpipe.data.prepare import prepare_data
from tawpipe.data.reading.hub import opened
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import find_sets
from tawpipe.data.report import ReadCounts, Skipped
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenised import TokenisedText
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError
from tawpipe.train.settings.config import load_config

ASK, SAID = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
CHAT = [ASK, SAID]
ADD = {"name": "add", "arguments": {"a": 2, "b": None}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood %}{{ '(' + mood + ')' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '|' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def plain():
    return train_tokenizer(["the answer to every question is a number of the house " * 20], 300)


@pytest.fixture(scope="module")
def tokenizer(plain):
    own = with_own(plain, TEMPLATE)
    own.add_tokens(["|"], special_tokens=True)
    return own


def read(tokenizer, path: Path, **settings: Any) -> tuple[list[str], list[str], ReadCounts]:
    """Documents, what is learned of each, and what is said."""
    columns = Columns.of(data := DataSettings(data=[str(path)], **settings))
    files = find_files(data.data)
    as_chat = TokenisedText(data, files, path.parent, tokenizer=tokenizer, model=None).as_chat
    renderer, counts = Renderer(tokenizer, columns, as_chat=as_chat), ReadCounts()
    rows = [row for file in files for row in RowReader(columns).read(file)]
    documents = list[Document]()
    for row in rows:
        for document in [row] if isinstance(row, Skipped) else renderer.render(row):
            if isinstance(document, Skipped):
                _ = document.why == AS_CHAT or counts.add_skipped(document)
            else:
                documents.append(document)
    wholes = ["".join(piece.text for piece in document.pieces) for document in documents]
    return wholes, ["".join(p.text for p in document.pieces if p.counts) for document in documents], counts


@pytest.fixture
def given(tokenizer, tmp_path):
    def read_rows(*rows: dict, **settings: Any):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read(tokenizer, tmp_path / "a.jsonl", **settings)

    return read_rows


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": CHAT, "label": True}, "label"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "label"),
        ({"instruction": "a", "output": "b", "kto_tag": 0}, "kto_tag"),
        ({"prompt": "a", "completion": ["b"], "labels": [True, False]}, "labels"),
        ({"conversations": CHAT, "chosen": SAID}, "chosen"),
        ({"prompt": "a", "response": "b", "rejected_response": "c"}, "rejected_response"),
        ({"messages": CHAT, "rejectedMessages": CHAT}, "rejectedMessages"),
        ({"messages": CHAT, "image": "a.png"}, "image"),
        ({"messages": CHAT, "video_urls": ["a.mp4"]}, "video_urls"),
        ({"instruction": "a", "output": "b", "audios": [{"path": "a.wav"}]}, "audios"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history"),
        ({"messages": CHAT, "weight": 0.5}, "weight"),
    ],
)
def test_columns_that_change_the_meaning_of_a_row_are_refused(given, row, column):
    with pytest.raises(UserError, match=f"--data.*a.jsonl, line 2, {column} = .*--ignore-columns {column} trains"):
        given({"messages": CHAT}, row)
    if isinstance(row.get("completion"), list):
        return
    wholes, _, counts = given(row, ignore_columns=[column])
    assert len(wholes) == 1 and not counts.troubles
    nothing: Any
    for nothing in (None, "", [], {}):
        wholes, _, counts = given(row | {column: nothing})
        assert len(wholes) == 1 and not counts.troubles


@pytest.mark.parametrize(
    ("row", "way"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--columns response=chosen --ignore-columns rejected learns"),
        ({"rejected_messages": CHAT, "chosen_messages": CHAT},
         "--columns messages=chosen_messages --ignore-columns rejected_messages learns"),
        ({"preferred_output": CHAT, "non_preferred_output": CHAT}, "--columns messages=preferred_output"),
    ],
)  # fmt: skip
def test_preference_data_is_refused_and_message_names_columns_to_train_on(given, row, way):
    with pytest.raises(UserError, match=way):
        given(row)
    words = way.split()
    others = words[3:4] or ["non_preferred_output"]
    assert len(given(row, columns=[words[1]], ignore_columns=others)[0]) == 1


def test_tables_are_refused_for_the_same_columns_as_json(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / "a.parquet"
    rows = [{"messages": CHAT, "label": None, "id": 1}, {"messages": CHAT, "label": False, "id": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(UserError, match=r"a\.parquet, row 2, label = False"):
        read(tokenizer, path)
    _, learned, counts = read(tokenizer, path, ignore_columns=["label"])
    assert learned == ["Four.|"] * 2
    assert [trouble.line for trouble in counts.troubles] == [
        f"2 rows with columns that are not read: id; the first: {path}, row 1"
    ]
    name = f"hf:{tmp_path / 'rows'}"
    for streaming in (False, True):
        (part,) = opened(find_sets([name])[0].files, streaming=streaming, setting="--data")
        with pytest.raises(UserError, match="row 2, label = False"):
            list(RowReader(Columns()).read(part))
        assert len(list(RowReader(Columns(ignored=("label",))).read(part))) == 2


def test_image_columns_are_refused_before_an_image_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    text, picture = datasets.Value("string"), {"bytes": b"no picture", "path": None}
    features = datasets.Features(
        prompt=text, response=text, photo=datasets.Image(), scans=datasets.List(datasets.Image())
    )
    rows = {"prompt": ["a"], "response": ["b"], "photo": [picture], "scans": [[picture]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "rows" / "a.parquet"))
    (part,) = opened(find_sets([f"hf:{tmp_path / 'rows'}"])[0].files, streaming=False, setting="--data")
    with pytest.raises(UserError, match=r"photo: Image.*--ignore-columns photo scans"):
        list(RowReader(Columns()).read(part))
    assert len(list(RowReader(Columns(ignored=("photo", "scans"))).read(part))) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_run_on_preference_data_is_refused(tokenizer, tmp_path, streaming):
    rows = [{"prompt": "Two?", "completion": "two words", "label": n % 2 == 0} for n in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"data": [str(tmp_path / "a.jsonl")], "cache_dir": str(tmp_path / "cache")}
    settings |= {"streaming": streaming, "validation_fraction": 0.0, "packing": "fit"}
    with pytest.raises(UserError, match="line 1, label = True"):
        prepare_data(DataSettings(**settings), sequence_length=32, seed=0, tokenizer=tokenizer)
    data = prepare_data(
        DataSettings(**settings, ignore_columns=["label"]), sequence_length=32, seed=0, tokenizer=tokenizer
    )
    assert data.report.read.chat == 4


def test_refused_validation_row_names_the_validation_setting(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT, "label": False}))
    given: dict[str, Any] = {"data": [str(tmp_path / "a.jsonl")], "validation_data": [str(tmp_path / "b.jsonl")]}
    with pytest.raises(UserError, match=r"^--validation-data: got '.*b.jsonl, line 1, label = False'"):
        prepare_data(DataSettings(**given, cache_dir=str(tmp_path)), sequence_length=32, seed=0, tokenizer=tokenizer)


def test_text_rows_may_have_any_other_columns(given):
    rows = [{"text": "a", "label": False, "score": 1}, {"text": "b", "chosen": "x", "images": ["a.png"], "none": None}]
    wholes, _, counts = given(*rows)
    assert wholes == ["a", "b"]
    (trouble,) = counts.troubles
    assert trouble.number == 2 and trouble.line.startswith(
        "2 rows with columns that are not read: label, score, chosen, images; the first: "
    )


def test_a_table_of_texts_and_chats_is_read_whole(tokenizer, tmp_path):
    """Also where --columns names the column of the texts, whose kind then goes first."""
    rows = [{"body": "a", "messages": None, "id": 1}, {"body": None, "messages": CHAT, "id": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    wholes, _, counts = read(tokenizer, tmp_path / "a.parquet", columns=["text=body"])
    assert wholes == ["a", "<user>Two and two?|<assistant>Four.|"] and counts.troubles[0].names == ["id"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"body": "a", "id": 1, "no": 2}]), tmp_path / "b.parquet")
    wholes, _, counts = read(tokenizer, tmp_path / "b.parquet", columns=["text=body"], ignore_columns=["no"])
    assert wholes == ["a"] and counts.troubles[0].names == ["id"]


def test_unread_columns_of_many_rows_are_reported_in_one_line(given):
    _, _, counts = given(*[{"messages": CHAT, f"score_{n % 30}": n, "text": "x"} for n in range(60)])
    (trouble,) = counts.troubles
    assert trouble.number == 60 and trouble.line.startswith("60 rows with columns that are not read: score_0, text, sc")
    assert "and 11 more; the first:" in trouble.line and "line 1" in trouble.line
    total = ReadCounts.merged([counts, given({"messages": CHAT, "other": 1})[2]])
    assert total.troubles[0].number == 61 and len(total.troubles[0].names) == 32 and len(counts.troubles[0].names) == 31


def test_chat_template_kwargs_reach_the_template(given, tokenizer):
    wholes, _, counts = given({"messages": CHAT, "chat_template_kwargs": {"mood": "kind", "speed": 3}})
    assert wholes == [tokenizer.apply_chat_template(CHAT, tokenize=False, mood="kind")]
    assert [trouble.names for trouble in counts.troubles] == [["chat_template_kwargs.speed"]]
    wholes, _, counts = given({"prompt": "a", "output": "b", "chat_template_kwargs": '{"mood": "dry"}'}, as_chat="on")
    assert wholes[0].startswith("(dry)") and not counts.troubles
    for wrong in ({"messages": []}, [1], "kind"):
        assert "chat_template_kwargs" in given({"messages": CHAT, "chat_template_kwargs": wrong})[2].troubles[0].why
    counts = given({"prompt": "a", "output": "b", "chat_template_kwargs": {"mood": "dry"}}, as_chat="off")[2]
    assert "'chat_template_kwargs' beside an instruction that is no chat" in counts.troubles[0].why


SYSTEM, TOOL = {"role": "system", "content": "Be kind."}, {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("row", "names", "shown"),
    [
        ({"system": "Be brief.", "messages": [SYSTEM, *CHAT]}, ("system", "the first message"), ""),
        ({"system": "Be kind.", "messages": [SYSTEM, *CHAT]}, (), "<system>Be kind.|<user>"),
        ({"system": "Be brief.", "prompt": [SYSTEM, ASK], "completion": "4"}, ("system", "the first message"), ""),
        ({"system": "Be brief.", "prompt": [ASK], "completion": [SAID]}, (), "<system>Be brief.|<user>"),
        ({"input": "2 2", "prompt": [ASK], "completion": [SAID]}, ("input", "messages"), ""),
        ({"input": "2 2", "conversations": CHAT}, ("input", "messages"), ""),
        ({"input": ASK["content"], "conversations": CHAT}, (), "<user>Two"),
        ({"messages": [SYSTEM | {"tools": [{"name": "sub"}]}, *CHAT], "tools": [TOOL]},
         ("tools", "tools of the first message"), ""),
        ({"messages": [SYSTEM | {"functions": json.dumps([TOOL])}, *CHAT], "tools": [TOOL]}, (), '[{"type": "f'),
        ({"messages": CHAT, "functions": [{"name": "add"}], "tools": [{"name": "sub"}]}, ("tools", "functions"), ""),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, (), '[{"type": "function"'),
        ({"messages": [ASK | {"value": "Three?"}, SAID]}, ("content", "value"), ""),
        ({"messages": [ASK | {"value": "Two and two?", "from": "human"}, SAID]}, (), "<user>Two"),
        ({"messages": [ASK | {"from": "gpt"}, SAID]}, ("role", "from"), ""),
        ({"messages": [ASK, SAID | {"reasoning": "a", "thought": "b"}]}, ("reasoning", "thought"), ""),
        ({"messages": [ASK, SAID | {"thinking": "a", "reasoning_content": "a"}]}, (), "<user>Two"),
        ({"messages": [ASK, SAID | {"loss": True, "train": 0}]}, ("loss", "train"), ""),
        ({"messages": [ASK, SAID | {"loss": "true", "loss_weight": 1.0}]}, (), "<user>Two"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [ADD], "function_call": {"name": "sub"}}]},
         ("tool_calls", "function_call"), ""),
        ({"messages": [ASK, SAID | {"function_call": {"function": ADD, "arguments": '{"a": 2}'}}]},
         ("function.arguments", "arguments"), ""),
    ],
)  # fmt: skip
def test_two_differing_sources_of_one_field_are_both_named(given, row, names, shown):
    wholes, _, counts = given(row)
    if names:
        (trouble,) = counts.troubles
        assert trouble.kind == "row" and all(repr(name) in trouble.why or name in trouble.why for name in names)
    else:
        assert wholes[0].startswith(shown) and all("thought" in trouble.why for trouble in counts.troubles)


def test_tools_beside_an_instruction_without_a_chat_template_are_refused(plain, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "tools": [TOOL]}))
    for as_chat in ("auto", "off"):  # the tokenizer has no template
        (trouble,) = read(plain, tmp_path / "a.jsonl", as_chat=as_chat)[2].troubles
        assert trouble.kind == "row" and "'tools' beside an instruction" in trouble.why
    assert '{"name": "add"}' in read(plain, tmp_path / "a.jsonl", as_chat="on")[0][0]


def test_message_fields_that_the_template_ignores_are_named_once(given, tokenizer):
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}, "strict": True}}]
    chat = [ASK | {"name": "Ann", "mood": "dry", "train": 1}, {"role": "assistant", "content": "", "tool_calls": calls}]
    chat += [{"role": "tool", "content": [{"type": "text", "text": "4", "cached": True}], "thoughts": "hm"}, SAID]
    wholes, _, counts = given({"messages": chat}, {"messages": [ASK | {"lang": "en", "refusal": None}, SAID]})
    (trouble,) = counts.troubles
    assert trouble.number == 2 and trouble.kind == "note" and "neither learned nor shown" in trouble.why
    fields = ["train of user", "content.cached", "reasoning_content of tool", "name", "mood", "lang"]
    assert sorted(trouble.names) == sorted([*fields, "tool_calls.id"])  # it shows a function as JSON, "strict" included
    assert wholes[0].startswith("<user>Two and two?|") and len(wholes) == 2


def test_field_replaced_by_a_columns_setting_is_named_as_unread(given):
    turns = [{"role": "user", "content": "<b>2?</b>", "words": "2?"}, {"role": "gpt", "content": "", "words": "Two."}]
    wholes, learned, counts = given({"messages": turns}, columns=["content=words"])
    assert wholes == ["<user>2?|<assistant>Two.|"] and learned == ["Two.|"]
    assert counts.troubles[0].names == ["content beside words"]


@pytest.mark.parametrize(
    ("content", "ignored", "shown"),
    [
        ([{"type": "image_url", "image_url": {"url": "a"}}, {"type": "text", "text": "Two?"}], "image_url", "Two?"),
        ([{"type": "text", "value": "Two?"}, {"audio": "a.wav"}], "audio", "Two?"),
        ([{"type": "input_image", "file_id": "a"}, {"type": "input_text", "text": "Two?"}], "input_image", "Two?"),
    ],
)  # fmt: skip
def test_images_and_audio_in_messages_are_refused(given, content, ignored, shown):
    row = {"messages": [{"role": "user", "content": content}, SAID]}
    with pytest.raises(UserError, match=f"line 1, message 1: '{ignored}'.*--ignore-columns {ignored} leaves"):
        given(row)
    assert given(row, ignore_columns=[ignored])[0] == [f"<user>{shown}|<assistant>Four.|"]
    with pytest.raises(UserError, match="message 2: 'images'"):
        given({"messages": [ASK, SAID | {"images": ["a.png"]}]})


def test_null_in_json_is_kept_and_null_that_fills_a_table_is_dropped(given, tokenizer, tmp_path):
    """Arguments and schemas are compared with what Python's own json makes of them."""
    schema = {"name": "add", "parameters": {"properties": {"b": {"default": None}}}}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": ADD}]}
    row = {"messages": [ASK, calls], "tools": [{"type": "function", "function": schema}]}
    assert given(row)[0] == [json.dumps(row["tools"]) + "<user>Two and two?|<assistant>" + json.dumps(ADD) + "|"]
    other = {**calls, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"b": 1}}}]}
    rows = [{"messages": [ASK, calls]}, {"messages": [ASK, other]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    arguments = [json.loads(text[:-1])["arguments"] for text in read(tokenizer, tmp_path / "b.parquet")[1]]
    assert arguments == [{"a": 2}, {"b": 1}]
    turns = {"role": ["user", "assistant"], "content": ["Two?", None], "function_call": [None, ADD]}
    assert given({"messages": turns})[0] == ["<user>Two?|<assistant>" + json.dumps(ADD) + "|"]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([{"role": "tool_call", "content": json.dumps(ADD)}, {"role": "tool_response", "content": "4"}, SAID],
         f"{json.dumps(ADD)}|<tool>4|<assistant>Four.|"),
        ([{"from": "function_call", "value": json.dumps([ADD, ADD])}, {"role": "ipython", "content": "4"}, SAID],
         f"{json.dumps(ADD)}{json.dumps(ADD)}|<tool>4|<assistant>Four.|"),
        ([{"role": "tool_call", "content": json.dumps(ADD)}] * 2 + [SAID],
         f"{json.dumps(ADD)}{json.dumps(ADD)}|<assistant>Four.|"),
        ([{"role": "assistant", "content": "I add."}, {"role": "tool_call", "content": json.dumps(ADD)}],
         f"I add.{json.dumps(ADD)}|"),
        ([{"role": "assistant", "content": [{"type": "text", "value": "I "}, {"type": "text", "value": "add."},
                                           {"type": "tool_call", "value": json.dumps(ADD)}], "loss_weight": 1.0}],
         f"I add.{json.dumps(ADD)}|"),
    ],
)  # fmt: skip
def test_all_forms_of_tool_calls_render_alike(given, turns, expected):
    assert given({"messages": [ASK, *turns]})[0] == [f"<user>Two and two?|<assistant>{expected}"]


def test_tool_calls_with_different_loss_marks_are_separate_turns(given):
    calls = [{"role": "tool_call", "content": json.dumps(ADD), "loss": mark} for mark in (False, True)]
    _, learned, _ = given({"messages": [ASK, *calls]})
    assert learned == [json.dumps(ADD) + "|"]


@pytest.mark.parametrize(
    ("words", "file", "expected"),
    [
        ([], "", "auto"),
        (["--as-chat"], "", "on"),
        (["--as-chat", "off"], "", "off"),
        (["--as-chat", "true"], "", "on"),
        ([], "as_chat: false", "off"),
        ([], "as_chat: on", "on"),
        ([], "as_chat: 'auto'", "auto"),
    ],
)
def test_as_chat_is_read_from_command_line_and_file(tmp_path, words, file, expected):
    (tmp_path / "a.yaml").write_text(file)
    config = load_config([*(["--config", str(tmp_path / "a.yaml")] if file else []), *words])
    assert config.as_chat == expected
    with pytest.raises(UserError, match="--as-chat: got 'yes please'"):
        load_config(["--as-chat", "yes please"])


def test_instructions_become_chats_if_the_tokenizer_has_a_chat_template(tokenizer, plain, tmp_path):
    row = {"system": "Be brief.", "instruction": "Add.", "input": "2 2", "output": "4"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    chat = "<system>Be brief.|<user>Add.\n2 2|<assistant>4|"
    text = "Be brief.\n\nAdd.\n\n2 2\n\n4"
    for model, as_chat, expected in (
        (tokenizer, "auto", chat),
        (tokenizer, "on", chat),
        (tokenizer, "off", text),
        (plain, "auto", text),
    ):
        assert read(model, tmp_path / "a.jsonl", as_chat=as_chat)[0] == [expected]


def test_token_cache_depends_on_chat_and_column_settings(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"system": "Be brief.", "prompt": "Two?", "output": "two words"}))
    wholes = set()
    settings: dict[str, Any]
    for settings in ({}, {"ignore_columns": ["system"]}, {"as_chat": "off"}):
        data = DataSettings(
            data=[str(tmp_path / "a.jsonl")],
            cache_dir=str(tmp_path),
            validation_fraction=0.0,
            packing="none",
            **settings,
        )
        row = prepare_data(data, sequence_length=64, seed=0, tokenizer=tokenizer).train.sample(0)
        wholes.add(tokenizer.decode(row.input_ids[0].tolist()))
    assert len(wholes) == 3


def test_column_that_is_both_used_and_ignored_is_refused():
    with pytest.raises(UserError, match="--ignore-columns: got 'question'"):
        DataSettings(columns=["prompt=question"], ignore_columns=["question"]).check_data()


SHOWS_NAMES = (
    "{% for t in tools or [] %}{{ t.function.name }}({{ (t.function.parameters.properties or {}).keys() | join(',') }})"
    "{% endfor %}{% for m in messages %}{{ '<' + m.role + '>' + (m.tool_name or '') + (m.content or '') + '|' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("tool", "hidden"),
    [
        ({"parameters": SCHEMA}, []),
        ({"input_schema": SCHEMA}, []),
        ({"parameters": {"city": {"type": "string"}}}, ["tools.function.parameters.city"]),
        ({"parameters": SCHEMA, "returns": "a text"}, ["tools.function.returns"] * 2),
        (
            {"parameters": SCHEMA | {"properties": {"city": {"type": "string", "description": "The\nplace."}}}},
            ["tools.function.parameters.properties.city.description"],
        ),
    ],
)
def test_parts_of_tool_definitions_hidden_by_the_template_are_named(plain, tmp_path, tool, hidden):
    rows = [{"messages": CHAT, "tools": [{"name": "weather", **tool}]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    (whole,), _, counts = read(with_own(plain, SHOWS_NAMES), tmp_path / "a.jsonl")
    assert whole.startswith("weather(")
    assert [trouble.names for trouble in counts.troubles] == ([[*dict.fromkeys(hidden)]] if hidden else [])


def test_hidden_field_of_one_role_is_named_although_another_role_shows_it(plain, tmp_path):
    named = SHOWS_NAMES.replace("(m.tool_name or '')", "(m.name if m.role == 'tool' and m.name else '')")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "content": "9", "name": "clock", "tool_calls": call["tool_calls"]}
    chat = [{"role": "user", "content": "a", "name": "alice"}, call, result, SAID]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    _, _, counts = read(with_own(plain, named), tmp_path / "a.jsonl")
    (trouble,) = counts.troubles
    assert trouble.names == ["name of user"]


def test_template_kwargs_that_the_template_overwrites_are_named_as_unread(plain, tmp_path):
    own = with_own(plain, "{% set mood = 'kind' %}{{ mood }}{{ messages[0].thinking }}" + SHOWS_NAMES)
    row = {"messages": CHAT, "chat_template_kwargs": {"mood": "dry", "thinking": True}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (trouble,) = read(own, tmp_path / "a.jsonl")[2].troubles
    assert trouble.names == ["chat_template_kwargs.mood", "chat_template_kwargs.thinking"]


@pytest.mark.parametrize("value", [[None], [""], [None, []]])
def test_list_of_empty_values_is_not_taken_for_images(given, value):
    wholes, _, counts = given({"messages": CHAT, "images": value})
    assert len(wholes) == 1 and [trouble.names for trouble in counts.troubles] == [["images"]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "response_a": "b", "response_b": "c", "winner": "a"},
        {"conversation_a": CHAT, "conversation_b": CHAT, "winner": "model_a"},
        {"instruction": "a", "output_1": "b", "output_2": "c", "preference": 1},
        {"prompt": "a", "rejected": "b"},
        {"conversations": CHAT[:1], "chosen": SAID, "rejected": SAID},
    ],
)
def test_refused_comparison_data_suggests_no_columns(given, row):
    with pytest.raises(UserError, match="does not train on preferences") as refused:
        given(row)
    assert "--columns" not in str(refused.value) and "--ignore-columns" not in str(refused.value)
