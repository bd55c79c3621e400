"""``tawpipe chat``: answers are transformers' own, through the template, and a conversation goes on."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from published_folders import FP8_CONFIG, fp8, publish
from tawpipe.cli import main
from tawpipe.commands.chat import Conversation, model_folder, run
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The output folder of a run with a model of random weights, whose tokenizer has a template."""
    path = tmp_path_factory.mktemp("run") / "model"
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(**shape, vocab_size=300, max_position_embeddings=120)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer: Any = train_tokenizer(["how are you? [user] [assistant] [system] " * 20], 300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path.parent


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")


def answer(loaded, text: str, tokens: int) -> str:
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_chat_answers_as_the_model_through_its_chat_template(folder, loaded, capsys):
    words = ["chat", str(folder), "--tokens", "7", "--temperature", "0", "--system", "s", "--prompt", "how are you?"]
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == answer(loaded, "[system]s[user]how are you?[assistant]", 7).strip()


@pytest.mark.filterwarnings("ignore")
def test_chat_answers_from_fp8_weights_as_from_the_widened_ones(folder, loaded, tmp_path, capsys):
    """transformers widens them to the type in config.json, also where the rest is in fp32."""
    settings = FP8_CONFIG | {"weight_block_size": [16, 16]}
    publish(
        deepcopy(loaded[0]),
        tmp_path / "fp8",
        settings,
        r"_proj\.weight$",
        lambda name, value: fp8(name, value, (16, 16)),
    )
    answers = []
    for name in ("fp8", "fp8-dense"):
        loaded[1].save_pretrained(tmp_path / name)
        assert (
            main(["chat", str(tmp_path / name), "--tokens", "7", "--temperature", "0", "--prompt", "how are you?"]) == 0
        )
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_conversation_keeps_its_turns_until_a_new_one_begins(loaded, capsys):
    talk = Conversation(*loaded, tokens=5, temperature=0)
    first = talk.say("you?")
    assert first == answer(loaded, "[user]you?[assistant]", 5)
    assert talk.say("how") == answer(loaded, f"[user]you?[assistant]{first}[user]how[assistant]", 5)
    talk.begin()
    assert talk.say("you?") == first
    assert talk.say("how are you? " * 60) == "" and "/new starts a new one" in capsys.readouterr().out


def test_chat_reads_a_pipe_and_continues_text_without_a_template(folder, loaded, capsys, monkeypatch, tmp_path):
    model, tokenizer = loaded
    model.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(folder / "model")
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("how are\n\n/new\nhow are\n"))
    assert main(["chat", str(tmp_path), "--tokens", "6", "--temperature", "0"]) == 0
    begin = tokenizer.bos_token or ""
    said = answer(loaded, f"{begin}how are", 6)
    assert capsys.readouterr().out == f"{said}\n{said}\n"


@pytest.mark.parametrize("refused", ["system", "user"])
def test_role_refused_by_the_chat_template_is_reported_with_its_message(folder, loaded, refused):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    condition = f"{{% if messages[0].role == '{refused}' %}}"
    tokenizer.chat_template = condition + "{{ raise_exception('not this role') }}{% endif %}" + TEMPLATE
    talk = Conversation(loaded[0], tokenizer, tokens=5, temperature=0)
    talk.begin("be brief" if refused == "system" else "")
    with pytest.raises(UserError, match="the model's chat template says: not this role") as error:
        talk.say("you?")
    assert error.value.setting == ("--system" if refused == "system" else "MODEL")


def test_system_prompt_without_a_chat_template_is_refused(folder, loaded):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="--system: got 'be brief'; ignored: without a chat template"):
        Conversation(loaded[0], tokenizer, tokens=5).begin("be brief")


@pytest.mark.parametrize("setting", ["--prompt", "--system"])
def test_prompt_that_is_not_utf8_is_refused(setting):
    with pytest.raises(UserError, match=rf"{setting}: got '\\udcff'; text in UTF-8"):
        run(["nowhere", setting, "\udcff"])


def test_ctrl_c_ends_the_answer_but_not_the_conversation(loaded, capsys, monkeypatch):
    model, tokenizer = loaded
    talk = Conversation(model, tokenizer, tokens=5, temperature=0)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", interrupted)
        assert talk.say("you?") == "" and "removed from the chat" in capsys.readouterr().out
    assert talk.say("you?") == answer(loaded, "[user]you?[assistant]", 5)


def test_chat_refuses_wrong_folders_and_settings_by_name(folder, tmp_path, capsys):
    assert model_folder(folder) == model_folder(folder / "model") == folder / "model"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="this run has checkpoints but no model/ yet"):
        model_folder(tmp_path)
    assert main(["chat", str(tmp_path / "none")]) == 2
    (tmp_path / "config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 2
    assert "a model and a tokenizer that transformers loads" in capsys.readouterr().err
    assert main(["chat", str(folder), "--tokens", "0"]) == 2
    assert main(["chat", str(folder), "--temperature", "-1"]) == 2
    assert "--temperature: got -1.0; a number from 0 on" in capsys.readouterr().err
