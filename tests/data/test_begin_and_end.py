"""Begin and end of documents, and whose ids they have: one begin-of-text each, one end for all rows of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from letters import END, letters
from tawpipe.data.chats.chat import ChatRenderer
from tawpipe.data.encode import Encoder
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import PreparedData
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenizer import load_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>")
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]}
ASKED = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
INSTRUCTION = {"prompt": "q", "completion": "ok"}
BARE = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{{ eos_token }}{% endfor %}"
WRITES = "{{ bos_token }}" + BARE
LATE = "{% for m in messages %}{{ (bos_token if loop.first else '') + m.role + m.content }}{% endfor %}{{ eos_token }}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TEXT = "Hello World 123, don't.\n"


def prepared(tokenizer: PreTrainedTokenizerBase | None, folder: Path, /, *rows: dict, **others) -> PreparedData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"validation_fraction": 0.0, "cache_dir": str(folder / "cache"), "packing": "none"} | others
    return prepare_data(DataSettings(data=[str(path)], **values), sequence_length=512, seed=0, tokenizer=tokenizer)


def documents(data: PreparedData) -> list[list[int]]:
    return [data.train.sample(number).input_ids[0].tolist() for number in range(data.samples_per_epoch or 0)]


@pytest.mark.parametrize("as_chat", ["off", "on"])
@pytest.mark.parametrize("marks", [(), CHATML])
@pytest.mark.parametrize("template", [None, BARE, WRITES, LATE, MARKED, "chatml", "plain", "file"])
def test_every_document_begins_with_one_begin_token(tmp_path, template, marks, as_chat):
    named = {}
    if template in ("chatml", "plain", "file"):
        (tmp_path / "a.jinja").write_text(BARE)
        named = {"chat_template": str(tmp_path / "a.jinja") if template == "file" else template}
    tokenizer = letters(*marks, begin="<s>", template=None if named else template)
    rows = [{"text": "Hello."}, {"text": "<s>Hello."}, INSTRUCTION, CHAT, ASKED]
    data = prepared(tokenizer, tmp_path, *rows, as_chat=as_chat, **named)
    begin: Any = tokenizer.convert_tokens_to_ids("<s>")
    for ids in documents(data):
        assert ids[0] == begin and ids.count(begin) == 1, tokenizer.decode(ids)
    asked: Any = data.tokenizer.apply_chat_template(CHAT["messages"][:1], add_generation_prompt=True, return_dict=False)
    assert asked[0] == begin and asked.count(begin) == 1  # as servers ask the exported model
    ids = data.tokenizer.encode(ChatRenderer(data.tokenizer).question("q"), add_special_tokens=False)
    assert ids == asked
    said = "chat template without <s>:" in "\n".join(data.report.lines())
    assert said == (template in (BARE, MARKED, "chatml", "plain", "file"))


@pytest.mark.parametrize("template", [None, BARE, "chatml"])
def test_no_document_begins_with_a_token_that_the_tokenizer_does_not_add(tmp_path, template):
    named = {"chat_template": template} if template == "chatml" else {}
    tokenizer = letters(begin="<s>", places=False, template=None if named else template)
    data = prepared(tokenizer, tmp_path, {"text": "Hello."}, INSTRUCTION, CHAT, **named)
    assert not any(tokenizer.convert_tokens_to_ids("<s>") in ids for ids in documents(data))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("marks", "rows", "settings", "end"),
    [
        (CHATML, [{"text": "a"}, INSTRUCTION], {}, END),
        (CHATML, [CHAT, {"text": "a"}, INSTRUCTION], {}, "<|im_end|>"),
        (CHATML, [ASKED, {"text": "a"}], {}, "<|im_end|>"),
        (CHATML, [INSTRUCTION, {"text": "a"}], {"as_chat": "on"}, "<|im_end|>"),
        (CHATML, [CHAT, {"text": "a"}], {"chat_template": "chatml"}, "<|im_end|>"),
        ((), [CHAT, {"text": "a"}, INSTRUCTION], {}, END),
        (CHATML, [CHAT, {"text": "a"}], {"chat_template": "plain"}, END),
    ],
)
def test_all_rows_and_the_exported_tokenizer_use_one_end_token(tmp_path, streaming, marks, rows, settings, end):
    tokenizer = letters(*marks)
    data = prepared(tokenizer, tmp_path, *rows, streaming=streaming, stream_window=len(rows), **settings)
    ids = [data.train.sample(number).input_ids[0].tolist() for number in range(len(rows))]
    texts = [str(tokenizer.decode(some)).rstrip("\n") for some in ids]
    assert all(text.endswith(end) and not text.endswith(2 * end) for text in texts), texts
    assert data.tokenizer.eos_token == end


def odd(folder: Path, **config) -> Tokenizer:
    """Save a tokenizer.json that no class of transformers would build, beside a config."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["hello world 123 don't"] * 9, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    if config:
        named = {"bos_token": "<s>", "eos_token": "</s>", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return core


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizer", "PreTrainedTokenizerFast"])
def test_ids_follow_the_tokenizer_file_whatever_class_the_config_names(tmp_path, name):
    core = odd(tmp_path / "odd", tokenizer_class=name)
    wanted = core.encode(TEXT, add_special_tokens=False).ids
    differs = AutoTokenizer.from_pretrained(tmp_path / "odd").encode(TEXT, add_special_tokens=False) != wanted
    assert differs == (name != "PreTrainedTokenizerFast")
    data = prepared(None, tmp_path, {"text": TEXT}, tokenizer=str(tmp_path / "odd"))
    assert documents(data) == [[0, *wanted, 1]]
    assert (f"class {name} in its config would give other ids" in data.report.tokenizer) == differs
    data.tokenizer.save_pretrained(tmp_path / "exported")
    again = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert again.encode(TEXT, add_special_tokens=False) == wanted and again.eos_token == "</s>"


def test_tokenizer_file_without_a_config_defines_begin_and_end_tokens(tmp_path):
    odd(tmp_path / "odd")
    tokenizer = load_tokenizer(str(tmp_path / "odd" / "tokenizer.json"))
    assert Encoder(tokenizer).begin == [0] and (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
