"""Command ``tawpipe chat``: ask a trained model in the terminal, on one process, with transformers' ``generate``.

Questions go through the tokenizer's chat template. A model without a template continues the text instead.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.extras import install_hint
from tawpipe.options import CommandParser
from tawpipe.streams import check_text

SETTING = "MODEL"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
NEW = "/new"
"""Input that begins a new conversation."""


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe chat``: load a model, then print its answer to each question, until the questions end; return 0."""
    arguments = _parser().parse_args(argv)
    _check(arguments)
    folder = model_folder(Path(arguments.model).expanduser())
    import torch

    from tawpipe.runtime.world import pick_device

    torch.manual_seed(arguments.seed)
    device = pick_device(arguments.device, 0)
    model, tokenizer = load(folder, device, trust_remote_code=arguments.trust_remote_code)
    talk = Conversation(model, tokenizer, tokens=arguments.tokens, temperature=arguments.temperature)
    talk.begin(arguments.system)
    if sys.stdin.isatty():
        kind = "answers" if talk.chats else "continues the text you type: its tokenizer has no chat template"
        print(f"{folder} on {device} {kind}; {NEW} starts a new chat, ctrl-D ends")
    for question in _questions(arguments.prompt):
        if question == NEW:
            talk.begin(arguments.system)
        elif question:
            talk.say(question)
    return 0


def model_folder(path: Path, setting: str = SETTING) -> Path:
    """Return the folder of a model or adapter: ``path/model``, into which a run exports, or else ``path`` itself.

    Args:
        path: output folder of a run, or folder of a model or adapter.
        setting: name of the setting for the message.

    Raises:
        UserError: neither folder has a model.
    """
    for folder in (path / "model", path):
        if (folder / CONFIG).is_file() or (folder / ADAPTER).is_file():
            return folder
    expected = f"the output folder of a run that has exported its model, or a folder with {CONFIG} or {ADAPTER}"
    if (path / "checkpoints").is_dir():
        expected += f"; this run has checkpoints but no model/ yet (tawpipe export {shlex.quote(str(path))} writes it)"
    raise UserError(setting, str(path), expected)


def load(folder: Path, device: Any, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model and its tokenizer with transformers; return the model on ``device``, and the tokenizer.

    The model is in evaluation mode. On a GPU it has the type of its files; on a CPU fp32, in which it computes faster.
    For an adapter, peft loads it with its base model.

    Raises:
        UserError: the model cannot be loaded, or it is an adapter and peft is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    kind: Any = AutoModelForCausalLM
    if (folder / ADAPTER).is_file():
        try:
            from peft import AutoPeftModelForCausalLM as kind
        except ImportError as error:
            raise UserError(
                SETTING, str(folder), f"peft installed, as this is an adapter: {install_hint('peft')}"
            ) from error
    logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(SETTING, str(folder), f"a model and a tokenizer that transformers loads ({line})") from error
    if dtype is torch.float32 and all(each.dtype.itemsize > 1 for each in model.parameters()):
        model = model.float()  # weights in FP8 were widened to the type in config.json
    return model.to(device).eval(), tokenizer


class Conversation:
    """Conversation with a model, including earlier questions and answers.

    Args:
        tokens: largest number of tokens of an answer.
        temperature: sampling temperature; 0 always takes the likeliest token; None uses the model's generation config.
    """

    def __init__(self, model: Any, tokenizer: Any, *, tokens: int, temperature: float | None = None) -> None:
        from tawpipe.data.tokenizer import stops_of

        self._model, self._tokenizer, self._tokens = model, tokenizer, tokens
        self.chats = bool(tokenizer.chat_template)
        self._stops = stops_of(model, tokenizer)
        self._draws: dict[str, Any] = {}
        if temperature is not None:
            self._draws = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self._messages: list[dict[str, str]] = []

    def begin(self, system: str = "") -> None:
        """Forget the earlier questions and answers, and begin a new conversation.

        Args:
            system: system message; empty for none.

        Raises:
            UserError: there is a system message, but no chat template.
        """
        if system and not self.chats:
            raise UserError("--system", system, "ignored: without a chat template a model only continues texts")
        self._messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> str:
        """Ask the model ``text``, print its answer while it is generated, and return the answer.

        Question and answer are remembered for the next call. Without a chat template, the model continues ``text``
        instead, and sees no earlier texts. If the conversation exceeds the positions of the model, a message is
        printed. Then, and after ctrl-C, nothing is remembered and ``""`` is returned.

        Args:
            text: the question, or the beginning of a text.

        Raises:
            UserError: the chat template refuses the conversation.
        """
        import torch
        from transformers import TextStreamer

        from tawpipe.data.encode import Encoder
        from tawpipe.model.files.build import longest_allowed

        messages = [*self._messages, {"role": "user", "content": text}]
        if self.chats:
            ids = self._tokenizer.encode(self._rendered(messages), add_special_tokens=False)
        else:
            ids = Encoder(self._tokenizer).beginning(text)
        free_tokens = min(self._tokens, longest_allowed(self._model.config) - len(ids))
        if free_tokens < 1:
            print(f"the chat has {len(ids)} tokens, the limit of the model: {NEW} starts a new one")
            return ""
        streamer: Any = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        inputs = torch.tensor([ids], device=self._model.device)
        try:
            with torch.inference_mode():
                generated = self._model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    streamer=streamer,
                    max_new_tokens=free_tokens,
                    eos_token_id=self._stops or None,
                    pad_token_id=self._tokenizer.pad_token_id or (self._stops or [0])[0],
                    **self._draws,
                )
        except KeyboardInterrupt:
            print("\n(this question was removed from the chat)")
            return ""
        answer = self._tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        """Return the messages as a prompt, through the chat template; raise UserError if the template refuses them."""
        from jinja2.exceptions import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            refused = f"the model's chat template says: {error}"
            if messages[0]["role"] == "system":
                raise UserError("--system", messages[0]["content"], f"ignored: {refused}") from error
            expected = f"a model that can be asked: {refused}"
            raise UserError(SETTING, self._tokenizer.name_or_path, expected) from error


def _questions(questions: Sequence[str]) -> Iterator[str]:
    """Yield the questions of the command line; without any, read lines from standard input until it ends."""
    if questions:
        yield from questions
        return
    typed = sys.stdin.isatty()
    while True:
        try:
            yield input("> " if typed else "").strip()
        except (EOFError, KeyboardInterrupt):
            if typed:
                print()
            return


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError for a number outside its range, or for a text that cannot be encoded."""
    if arguments.tokens < 1:
        raise UserError("--tokens", arguments.tokens, "at least 1")
    if arguments.temperature is not None and not 0 <= arguments.temperature < float("inf"):
        raise UserError("--temperature", arguments.temperature, "a number from 0 on")
    check_text("--system", arguments.system)
    for prompt in arguments.prompt:
        check_text("--prompt", prompt)


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options of ``tawpipe chat``."""
    parser = CommandParser(
        prog="tawpipe chat",
        description=(
            "Chat with a trained model in the terminal, in one process. Uses the chat template of the tokenizer; "
            "without one the model continues the text. Questions may come from a pipe, one per line."
        ),
    )
    parser.add_argument("model", metavar=SETTING, help="a run's output folder, or a folder with a model or an adapter")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help=("ask this question and exit; may be given several times"),
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument(
        "--tokens", type=int, default=512, metavar="N", help=("longest answer in tokens (default: 512)")
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=("0 always takes the likeliest token (default: as the model says)"),
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to compute on")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that belongs to the model")
    return parser
