"""``tawpipe chat``: ask a trained model in the terminal, on one process, by transformers' own ``generate``.

A conversation goes through the tokenizer's chat template; a model without one continues texts instead.
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
"""What a user types to begin another conversation."""


def run(argv: Sequence[str]) -> int:
    """Runs ``tawpipe chat`` with the words ``argv`` and returns the exit code."""
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
    """The folder of a model or adapter: the one itself, or what a run has exported.

    Raises:
        UserError: there is none.
    """
    for folder in (path / "model", path):
        if (folder / CONFIG).is_file() or (folder / ADAPTER).is_file():
            return folder
    expected = f"the output folder of a run that has exported its model, or a folder with {CONFIG} or {ADAPTER}"
    if (path / "checkpoints").is_dir():
        expected += f"; this run has checkpoints but no model/ yet (tawpipe export {shlex.quote(str(path))} writes it)"
    raise UserError(setting, str(path), expected)


def load(folder: Path, device: Any, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model, in the type of its files (on a CPU in fp32, which it computes in faster), and its tokenizer.

    Raises:
        UserError: it cannot be loaded, and why.
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
    return model.to(device).eval(), tokenizer


class Conversation:
    """Questions and answers so far, and the model that answers.

    Args:
        tokens: of an answer at most.
        temperature: 0 for the likeliest token always; None as the model's own generation config says.
    """

    def __init__(self, model: Any, tokenizer: Any, *, tokens: int, temperature: float | None = None) -> None:
        from tawpipe.data.tokenizer import stops_of

        self._model, self._tokenizer, self._tokens = model, tokenizer, tokens
        self.chats = bool(tokenizer.chat_template)
        self._stops = stops_of(model, tokenizer)
        self._draws: dict[str, Any] = {}
        if temperature is not None:
            self._draws = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self._said: list[dict[str, str]] = []

    def begin(self, system: str = "") -> None:
        """Begin anew.

        Args:
            system: what the model is told first.

        Raises:
            UserError: there is no chat template that could say it.
        """
        if system and not self.chats:
            raise UserError("--system", system, "ignored: without a chat template a model only continues texts")
        self._said = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> str:
        """Ask, or without a chat template give a beginning. The answer is printed as it comes, and returned; ctrl-C
        ends it, and question and answer are forgotten.

        Raises:
            UserError: the chat template refuses the conversation.
        """
        import torch
        from transformers import TextStreamer

        from tawpipe.data.encode import Encoder
        from tawpipe.model.files.build import longest_allowed

        said = [*self._said, {"role": "user", "content": text}]
        if self.chats:
            ids = self._tokenizer.encode(self._rendered(said), add_special_tokens=False)
        else:
            ids = Encoder(self._tokenizer).beginning(text)
        room = min(self._tokens, longest_allowed(self._model.config) - len(ids))
        if room < 1:
            print(f"the chat has {len(ids)} tokens, the limit of the model: {NEW} starts a new one")
            return ""
        streamer: Any = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        given = torch.tensor([ids], device=self._model.device)
        try:
            with torch.inference_mode():
                generated = self._model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    streamer=streamer,
                    max_new_tokens=room,
                    eos_token_id=self._stops or None,
                    pad_token_id=self._tokenizer.pad_token_id or (self._stops or [0])[0],
                    **self._draws,
                )
        except KeyboardInterrupt:
            print("\n(this question was removed from the chat)")
            return ""
        answer = self._tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)
        self._said = [*said, {"role": "assistant", "content": answer}]
        return answer

    def _rendered(self, said: list[dict[str, str]]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            refused = f"the model's chat template says: {error}"
            if said[0]["role"] == "system":
                raise UserError("--system", said[0]["content"], f"ignored: {refused}") from error
            expected = f"a model that can be asked: {refused}"
            raise UserError(SETTING, self._tokenizer.name_or_path, expected) from error


def _questions(given: Sequence[str]) -> Iterator[str]:
    """What was given on the command line, or else what is typed, line by line, until it ends."""
    if given:
        yield from given
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
    if arguments.tokens < 1:
        raise UserError("--tokens", arguments.tokens, "at least 1")
    if arguments.temperature is not None and not 0 <= arguments.temperature < float("inf"):
        raise UserError("--temperature", arguments.temperature, "a number from 0 on")
    check_text("--system", arguments.system)
    for prompt in arguments.prompt:
        check_text("--prompt", prompt)


def _parser() -> argparse.ArgumentParser:
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
