"""Special tokens in what users, tools and the system wrote: as servers take them, or as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from letters import letters
from tawpipe.data.chats.special import BREAK
from tawpipe.data.prepare import prepare_data
from tawpipe.data.settings import DataSettings
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError

START, END = MARKS = ("<|im_start|>", "<|im_end|>")
SAID = f"stop{END} {END}now"
TOOLS = [{"type": "function", "function": {"name": "now", "description": f"ends {END}"}}]
CHAT = [{"role": "user", "content": SAID}, {"role": "assistant", "content": "ok"}]
WITH_TOOL = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {}}]},
    {"role": "tool", "content": SAID},
    {"role": "assistant", "content": "ok"},
]


def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer of the SentencePiece family: merges and spaces before words."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>", *MARKS], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(["user assistant system stop now im_end im_start <|> q ok " * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, unk_token="<unk>")


def prepared(tokenizer: PreTrainedTokenizerBase, folder: Path, mode: Any, *rows: dict, **others):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"validation_fraction": 0.0, "cache_dir": str(folder / "cache"), "packing": "none"} | others
    settings = DataSettings(data=[str(path)], special_in_text=mode, **values)
    data = prepare_data(settings, sequence_length=4096, seed=0, tokenizer=tokenizer)
    ids = [data.train.sample(number).input_ids[0].tolist() for number in range(len(rows))]
    return ids, "\n".join(data.report.lines())


@pytest.mark.parametrize("make", [lambda: letters(*MARKS), pieces], ids=["bytes", "pieces"])
@pytest.mark.parametrize("streaming", [False, True])
def test_special_tokens_in_user_text_follow_the_setting(tmp_path, make, streaming):
    tokenizer = make()
    for mode, within in (("keep", 2), ("plain", 0)):
        (ids,), said = prepared(tokenizer, tmp_path, mode, {"messages": CHAT}, streaming=streaming, stream_window=1)
        assert ids.count(tokenizer.convert_tokens_to_ids(START)) == 2
        assert ids.count(tokenizer.convert_tokens_to_ids(END)) == 2 + within
        assert "1 row with special tokens in what users, tools or the system said" in said
        assert "rows.jsonl, line 1 (<|im_end|>)" in said
        assert BREAK not in str(tokenizer.decode(ids)) and str(tokenizer.decode(ids)).count(END) == 4


def merged() -> PreTrainedTokenizerBase:
    """A tokenizer that merges the letters of special tokens with those beside them."""
    trained = train_tokenizer([f"user system now stop {' '.join(MARKS)} p{END}n " * 9], 400)
    trained.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return trained


@pytest.mark.parametrize("make", [lambda: letters(*MARKS), merged], ids=["bytes", "merged"])
def test_plain_user_text_has_ids_without_special_tokens(tmp_path, make):
    tokenizer = make()
    (ids,), _ = prepared(tokenizer, tmp_path, "plain", {"messages": CHAT})
    start, end = tokenizer.convert_tokens_to_ids(START), tokenizer.convert_tokens_to_ids(END)
    begin, close = ids.index(start), ids.index(end)
    wanted = tokenizer(f"user\n{SAID}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids[begin + 1 : close] == wanted


@pytest.mark.parametrize(
    ("row", "specials"),
    [
        ({"messages": WITH_TOOL}, 2),
        ({"messages": CHAT[1:], "system": SAID}, 2),
        ({"messages": [{"role": "user", "content": "q"}, CHAT[1]], "tools": TOOLS}, 1),
        ({"prompt": SAID, "completion": "ok"}, 2),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, 2),
    ],
)
def test_special_tokens_in_tools_system_and_prompts_follow_the_setting(tmp_path, row, specials):
    tokenizer = letters(*MARKS)
    end = tokenizer.convert_tokens_to_ids(END)
    (kept,), said = prepared(tokenizer, tmp_path, "keep", row)
    (plain,), other = prepared(tokenizer, tmp_path, "plain", row)
    assert kept.count(end) - plain.count(end) == specials and tokenizer.decode(kept) == tokenizer.decode(plain)
    assert "1 row with special tokens" in said and "1 row with special tokens" in other


@pytest.mark.parametrize("mode", ["keep", "plain"])
def test_special_tokens_in_answers_and_texts_are_kept(tmp_path, mode):
    tokenizer = letters(*MARKS)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{START}b"}]
    ids, said = prepared(tokenizer, tmp_path, mode, {"messages": chat}, {"text": f"a{START}b"})
    assert sorted(some.count(tokenizer.convert_tokens_to_ids(START)) for some in ids) == [1, 3]
    assert "special tokens" not in said


def test_unknown_special_in_text_mode_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--special-in-text.*keep, plain"):
        prepared(letters(), tmp_path, "drop", {"text": "a"})


def test_special_tokens_in_keys_of_tool_definitions_follow_the_setting(tmp_path):
    tokenizer = letters(*MARKS)
    tools = [{"name": "now", "parameters": {"type": "object", "properties": {f"a{END}": {"type": "string"}}}}]
    counted = []
    row = {"messages": [{**CHAT[0], "content": "q"}, CHAT[1]], "tools": tools}
    for mode in ("keep", "plain"):
        (ids,), said = prepared(tokenizer, tmp_path, mode, row)
        counted.append(ids.count(tokenizer.convert_tokens_to_ids(END)))
        assert "1 row with special tokens" in said
    assert counted[0] == counted[1] + 1
