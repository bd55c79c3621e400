"""Rendering of chats with a template: only the text that a model has to write after a prompt is learned."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date as day
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tawpipe.data.chats.forms import (
    SHOWN_AS,
    Message,
    end_of_words,
    forms,
    lacking,
    spelled,
    thought_and_words,
    without_thought,
)
from tawpipe.data.chats.messages import ASSISTANT, KNOWN_ROLES, Malformed
from tawpipe.data.chats.templates import CHATML_TOKENS, NAMED, PRINTS_DATE, fallback_template, template_text
from tawpipe.data.settings import Answers
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag of some templates around the text of the assistant."""

SWITCH = re.compile(r"\b(?!\w*(?:preserve|truncate|history|clear|keep|effort|budget))\w*(?:think|reason)\w*\b")
"""Names of template variables that turn thinking on and off."""

OPENED = re.compile(r"<(\w*(?:think|thought|reason)\w*)>\s*$")
"""Opening tag of a thought at the end of a prompt; the model then continues with a thought."""

MARK = "\ue000"
"""Placeholder content that occurs in no message."""

HIDES_CALLS = "with tool calls, which the chat template does not show (--chat-template chatml does)"

Tools = list[dict[str, Any]] | None


class ChatText(NamedTuple):
    """Piece of text whose tokens all count in the loss, or none of them."""

    text: str
    counts: bool


def today() -> str:
    """Return the current date, as 2026-11-28."""
    return day.today().isoformat()


def with_template(tokenizer: PreTrainedTokenizerBase, name: str, setting: str = "") -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer with a chat template, after testing that it renders a chat.

    With ``chatml``, ``<|im_end|>`` becomes the end-of-text token if the tokenizer has it.

    Args:
        tokenizer: tokenizer to copy.
        name: ``chatml``, ``plain`` or a file with a Jinja template.
        setting: setting that names the template, for errors.

    Raises:
        UserError: the template cannot render a chat.
    """
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template_text(name)
    if name == "chatml" and CHATML_TOKENS[1] in tokenizer.get_vocab():
        changed.eos_token = CHATML_TOKENS[1]
    try:
        messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "<think>\nc\n</think>\n\nb"}]
        if lost := ChatRenderer(changed).chat(messages).lost:
            raise lost[0]
    except Malformed as error:
        raise UserError(setting, name, f"a Jinja template of a chat ({error.why}: {error.detail})") from error
    return changed


class Chat(NamedTuple):
    """Documents of one chat, and reasons for what is left out.

    Attributes:
        documents: pieces of each document; an answer is learned in one of them.
        lost: answers that are not learned, each with the reason and its number among the messages.
        notes: further remarks for the user: with a place if about one answer, without if about the row.
        hidden: number of earlier answers whose words or calls the template does not show.
    """

    documents: list[tuple[ChatText, ...]]
    lost: list[Malformed]
    notes: list[Malformed]
    hidden: int = 0


class Learnable(NamedTuple):
    """An answer: its prompt, the text that the model has to write, the template's text after it, and remarks."""

    prompt: str
    learned: str
    rest: str = ""
    notes: tuple[str, ...] = ()


def with_beginning(tokenizer: PreTrainedTokenizerBase, beginning: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer if its chats begin with ``beginning``, else a copy whose template writes it first."""
    written = "{{ bos_token }}" if beginning == tokenizer.bos_token else beginning

    def begins(template: str) -> str:
        """Return ``template``, with the beginning written before it if a rendered chat lacks it.

        A template that cannot be rendered is searched for ``bos_token`` instead."""
        chat = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        try:
            text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
        except Exception:  # templates may raise any error
            return template if "bos_token" in template else written + template
        return template if str(text).startswith(beginning) else written + template

    old_template: Any = tokenizer.chat_template
    template = (
        {name: begins(text) for name, text in old_template.items()}
        if isinstance(old_template, dict)
        else begins(old_template)
    )
    if template == old_template:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template  # pyright: ignore[reportAttributeAccessIssue]
    return changed


class ChatRenderer:
    """Renderer of chats as the model will be prompted, with the chat template of its tokenizer.

    For answer n of a chat, the prompt P is the earlier messages, rendered with a generation prompt. R is the chat up to
    the answer, rendered without one. Learned is the part of R that the model has to write after P, and the token that
    ends the turn.

    Args:
        tokenizer: tokenizer with the chat template; a built-in template is used if it has none.
        answers: ``shown`` makes one document of a chat and learns what the template shows of each answer. Otherwise
            every answer is learned after its own prompt. It gets a separate document if the template renders the
            earlier turns differently there.
        date: date that a template prints, as 2026-11-28; today by default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: Answers = "each", date: str = "") -> None:
        self._tokenizer = tokenizer
        self._answers: Answers = answers
        self._date = day.fromisoformat(date or today())
        self._fallback = None if tokenizer.chat_template else NAMED[fallback_template(tokenizer)]

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Pattern of all special tokens, including tokens that only tokenizer.json names (some end turns)."""
        added = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        special = sorted({*self._tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or "(?!)")

    @property
    def end_of_text(self) -> str:
        """End-of-text token, or ``""``."""
        return str(self._tokenizer.eos_token or "")

    def template(self, tools: Tools = None) -> str:
        """Return the text of the chat template.

        Args:
            tools: tools of the chat; a tokenizer may have a separate template for them.

        Raises:
            Malformed: the tokenizer has several templates and none for this case.
        """
        get: Any = self._tokenizer.get_chat_template
        return self._fallback or _refusals_named(lambda: get(None, tools))

    def question(self, text: str) -> str:
        """Return the prompt for one user message, ready for the model to answer.

        Raises:
            Malformed: the template refuses it.
        """
        return self.apply([{"role": "user", "content": text}], None, {}, asks=True)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        options: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Render a chat and return its documents.

        The message forms that templates may expect are tried in turn; the one that loses the fewest answers is used.

        Args:
            messages: messages of the chat.
            tools: JSON schemas of the tools that the model may call.
            options: further variables of the template.

        Raises:
            Malformed: nothing of the chat can be learned, or the template leaves out what the model should see.
        """
        template, best, refused = self.template(tools), None, None
        if tools and not re.search(r"\b(tools|tool_calls)\b", template):
            raise Malformed("with tools, which the chat template does not show (--chat-template chatml does)")
        for role in (message["role"] for message in messages):
            if role not in (*KNOWN_ROLES, "developer") and f"'{role}'" not in template and f'"{role}"' not in template:
                expected = f"expected {', '.join(KNOWN_ROLES)}, another name of one, or a role of the template"
                raise Malformed(f"with an unknown role ({expected})", repr(role))
        for form in forms(template, messages):
            try:
                chat = _OneForm(self, form, tools, dict(options or {}), template).read(self._answers)
            except Malformed as error:
                refused = refused or error
                continue
            if best is None or (len(chat.lost), chat.hidden) < (len(best.lost), best.hidden):
                best = chat
            if not best.lost and not best.hidden:
                break
        if best is None:
            raise refused or Malformed("without an answer to learn")
        return best

    def differ(self, messages: Sequence[Message], others: Sequence[Message], tools: Tools, options: Any) -> bool:
        """Return True if the template renders two chats differently; False if it refuses either."""
        first, second = (self._shown(chat, tools, options) for chat in (messages, others))
        return None not in (first, second) and first != second

    def _shown(self, messages: Sequence[Message], tools: Tools, options: Any) -> str | None:
        """Render the messages in the first form that the template accepts; None if it refuses all."""
        for form in forms(self.template(tools), messages):
            with contextlib.suppress(Malformed):
                return self.apply(form, tools, options, asks=False)
        return None

    def variables(self, tools: Tools) -> set[str]:
        """Return the names of variables that the template reads and does not set."""
        from jinja2.meta import find_undeclared_variables

        environment = self._compiled(tools).environment
        return find_undeclared_variables(environment.parse(self.template(tools)))

    def marked(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return (begin, end) of each part of the rendered text that the template marks as the assistant's.

        The numbers are indices of characters.

        Raises:
            Malformed: the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: dict[str, Any] = {**self._tokenizer.special_tokens_map, **options, "tools": tools}
        arguments |= {"conversations": [messages], "chat_template": self.template(tools)}
        self._compiled(tools)
        return _refusals_named(lambda: render_jinja_template(**arguments, return_assistant_tokens_mask=True))[1][0]

    def apply(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any], *, asks: bool) -> str:
        """Render messages as text.

        Args:
            messages: messages of the chat.
            tools: JSON schemas of the tools, or None.
            options: further variables of the template.
            asks: add the generation prompt.

        Raises:
            Malformed: the template refuses them.
        """
        # apply_chat_template would remove nulls, which some templates test.
        variables = {**self._tokenizer.special_tokens_map, "documents": None, "add_generation_prompt": asks, **options}
        compiled = self._compiled(tools)
        return _refusals_named(lambda: compiled.render(messages=messages, tools=tools, **variables))

    def _compiled(self, tools: Tools) -> Any:
        """Return the compiled template, which prints the renderer's date; transformers would print the current one."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled = _refusals_named(lambda: _compile_jinja_template(self.template(tools)))
        compiled.globals[PRINTS_DATE] = self._date.strftime
        return compiled


class _OneForm:
    """One form of the messages of a chat, rendered by a template."""

    def __init__(
        self, renderer: ChatRenderer, messages: Sequence[Message], tools: Tools, options: dict[str, Any], template: str
    ) -> None:
        self._renderer, self._messages, self._tools = renderer, messages, tools
        self._options, self._template = options, template
        self._rendered: dict[tuple[object, ...], str] = {}

    def read(self, answers: Answers) -> Chat:
        """Return the documents with the learned parts of all answers, the lost answers, and remarks.

        Answers are read from the last to the first. An answer shares the document of a later one if that document's
        text begins with its prompt and its learned text.

        Raises:
            Malformed: the template leaves out a turn before the last answer.
        """
        messages = self._messages
        answer_numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        learned = [number for number in answer_numbers if messages[number].get("weight", 1) != 0]
        texts, lost, notes = list[tuple[str, dict[int, int]]](), list[Malformed](), list[Malformed]()
        last, prompt = -1, ""
        for number in reversed(learned):
            try:
                if not any(thought_and_words(messages[number])) and not messages[number].get("tool_calls"):
                    raise Malformed("with an empty answer")
                answer = self._shown(number) if answers == "shown" else self._answer(number)
                answer = self._check_answer(number, answer)
            except Malformed as error:
                lost.append(
                    Malformed(error.why, f"message {number + 1}" + (f": {error.detail}" if error.detail else ""))
                )
                continue
            notes += [Malformed(why, f"message {number + 1}") for why in answer.notes]
            prompt = prompt or answer.prompt
            learned_text = answer.prompt + answer.learned
            spans = next((spans for text, spans in texts if text.startswith(learned_text)), None)
            if spans is None:
                last, spans = max(last, number), {}
                texts.append((learned_text + answer.rest, spans))
            spans[len(answer.prompt)] = len(learned_text)
        hidden = list[int]()
        if texts:
            self._check_prompt(messages[:last], prompt)
            if last == answer_numbers[-1] < len(messages) - 1 and answers != "shown":
                notes.append(Malformed("with turns at the end that no answer follows, left out"))
            hidden = [number for number in range(last) if self._hides(number, prompt, number in learned)]
            if set(hidden) - set(learned):
                notes.append(Malformed("with words or calls before the last answer that the chat template leaves out"))
        return Chat([tuple(_pieces(text, spans)) for text, spans in texts], lost, notes, len(hidden))

    def _hides(self, number: int, prompt: str, is_learned: bool) -> bool:
        """Return True if ``prompt``, the prompt of the last answer, hides calls or words of message ``number``.

        Words of an answer that is learned itself (``is_learned``) may be missing.
        """
        message = self._messages[number]
        if message["role"] != ASSISTANT:
            return False
        words = "" if is_learned else thought_and_words(message)[1]
        calls = message.get("tool_calls") or []
        return not any(form in prompt for form in spelled(words)) or any(lacking(call, prompt) for call in calls)

    def _answer(self, number: int) -> Learnable:
        """Return the prompt of answer ``number`` and the text that the model has to write after it.

        If the rendered chat does not begin with the prompt, other settings of thinking, opened thoughts and headers are
        tried.

        Raises:
            Malformed: the template refuses the messages, or no prompt fits the answer.
        """
        prompt, shown = self._asked(number), self._text_through(number)
        for call in self._messages[number].get("tool_calls") or []:
            if missing := lacking(call, shown):
                raise Malformed(HIDES_CALLS, missing)
        if number and prompt == self._text_through(number - 1) and GENERATION.search(self._template):
            marks = self._renderer.marked(self._messages[: number + 1], self._tools, self._options)
            if here := [mark for mark in marks if mark[0] >= len(prompt)]:
                begin, end = here[0][0], here[-1][1]
                return Learnable(shown[:begin], shown[begin:end], shown[end:])
        if shown.startswith(prompt):
            return self._ended(number, prompt, shown, {})
        for switch in self._switches():
            with contextlib.suppress(Malformed):
                other_prompt, other = self._asked(number, **switch), self._text_through(number, **switch)
                if other.startswith(other_prompt):
                    ((name, value),) = switch.items()
                    way = f"{name}={str(value).lower()}"
                    note = f"fitting only the prompt with {way}, learned with it"
                    return self._ended(number, other_prompt, other, switch)._replace(notes=(note,))
        if (opened := OPENED.search(prompt)) is not None:
            return self._thought_through(number, prompt, shown, opened)
        behind = self._behind_header(number, prompt, shown)
        if behind is not None:
            return self._ended(number, prompt, prompt + behind, {})
        before = self._text_through(number - 1) if number else ""
        header = self._renderer.special.match(prompt.removeprefix(before).lstrip())
        if header and shown.startswith(before) and not shown[len(before) :].lstrip().startswith(header[0]):
            notes = ("shown by the chat template without a header, learned as shown",)
            return self._ended(number, before, shown, {})._replace(notes=notes)
        raise Malformed("with an answer that the chat template shows behind no prompt")

    def _thought_through(self, number: int, prompt: str, shown: str, opened: re.Match[str]) -> Learnable:
        """Return the answer ``number`` to a prompt that ends with the opening tag of a thought, such as ``<think>``.

        If the rendered chat shows the thought, the answer is taken from there. Otherwise it is joined from the thought
        in the message, the closing tag, and the text that the template shows.

        Args:
            number: index of the answer among the messages.
            prompt: rendered prompt of the answer.
            shown: rendered chat through the answer.
            opened: match of the opening tag in ``prompt``.

        Raises:
            Malformed: the message has no thought, or the answer is not found in ``shown``.
        """
        tag, asked = opened[1], prompt[: opened.start()]
        body = shown[len(asked) :] if shown.startswith(asked) else self._behind_header(number, asked, shown)
        if body is not None and (again := re.match(rf"\s*<{tag}>", body)):  # the template shows the thought
            return self._ended(number, prompt, prompt + body[again.end() :].lstrip(), {})
        message = self._messages[number]
        field = message.get(SHOWN_AS[0])
        tagged = re.match(rf"\s*<{tag}>(.*?)</{tag}>(\s*)", message["content"] or "", re.DOTALL)
        if tagged is None and not field:  # as such a model writes it: without the opening tag
            tagged = re.match(rf"(.*?)</{tag}>(\s*)", message["content"] or "", re.DOTALL)
        thought, space = (tagged[1], tagged[2]) if tagged else (field, "\n\n")
        if body is None or thought is None:
            why = f"with an answer that lacks a thought, although the prompt begins one ({opened[0].strip()})"
            raise Malformed(f"{why}; write <{tag}></{tag}> for an empty thought, or use --answers shown")
        close = f"</{tag}>" if tagged else f"\n</{tag}>"
        space = "" if body[:1].isspace() else space
        return self._ended(number, prompt, prompt + thought.lstrip() + close + space + body, {})

    def _behind_header(self, number: int, prompt: str, shown: str) -> str | None:
        """Return the text of ``shown`` after the header of its last turn, or None if the header is not found.

        The header is the part of ``prompt`` after the earlier messages. ``shown`` may render the earlier messages
        differently from ``prompt``."""
        header = prompt.removeprefix(self._text_through(number - 1)) if number else prompt
        other = self._render([*self._messages[:number], {"role": ASSISTANT, "content": MARK}], asks=False)
        place = shown[: _alike(shown, other)].rfind(header) if header != prompt and header.strip() else -1
        is_last = place >= _alike(shown, self._text_through(number - 1) if number else "")
        return shown[place + len(header) :] if place >= 0 and is_last else None

    def _ended(self, number: int, prompt: str, shown: str, switch: dict[str, Any]) -> Learnable:
        """Return answer ``number``: the text of ``shown`` after ``prompt``, up to the token that ends its turn.

        This is the answer's last special token, else the first token of the next turn, else the end-of-text token.
        Without any of them a remark is added. ``switch`` are further variables of the template."""
        behind = shown[len(prompt) :]
        if end := _last_end(self._renderer.special, behind):
            return Learnable(prompt, behind[:end], behind[end:])
        if marker := self._next_marker(number, switch):
            return Learnable(prompt, behind.rstrip() + marker)
        if self._renderer.end_of_text:
            return Learnable(prompt, behind + self._renderer.end_of_text)
        return Learnable(prompt, behind, notes=("ending without a token to stop at",))

    def _next_marker(self, number: int, switch: dict[str, Any]) -> str:
        """Return the token with which the next turn begins, with white space before it; or ``""``.

        Thoughts are removed first, because a template may drop them once a turn follows.
        """
        following: Message = {"role": "tool" if self._messages[number].get("tool_calls") else "user", "content": MARK}
        if number + 1 < len(self._messages) and self._messages[number + 1]["role"] != ASSISTANT:
            following = self._messages[number + 1]
        before = [without_thought(message) for message in self._messages[: number + 1]]
        try:
            alone = self._render(before, asks=False, **switch).rstrip()
            more = self._render([*before, following], asks=False, **switch)
        except Malformed:
            return ""
        marker = self._renderer.special.search(more, len(alone)) if more.startswith(alone) else None
        between = more[len(alone) : marker.start()] if marker else "-"
        return "" if marker is None or between.strip() else between + marker[0]

    def _shown(self, number: int) -> Learnable:
        """Return the answer as it is shown in the rendering of the whole chat.

        Raises:
            Malformed: its header is not found there.
        """
        whole, prompt, message = (
            self._text_through(len(self._messages) - 1),
            self._asked(number),
            self._messages[number],
        )
        header = prompt.removeprefix(self._text_through(number - 1)) if number else prompt
        if opened := OPENED.search(header):
            header = header[: opened.start()]
        other = [*self._messages]
        other[number] = {**without_thought(message), "content": MARK}
        place = whole[: _alike(whole, self._render(other, asks=False))].rfind(header)
        if place < 0:
            raise Malformed("with an answer that the chat template shows behind no header")
        begin = place + len(header)
        alone = self._text_through(number)
        end = end_of_words(message, whole, begin)
        ending = alone[end_of_words(message, alone, alone.rfind(header) + len(header)) :].rstrip()
        for part in re.split(r"(\s+)", ending):
            if not whole.startswith(part, end):
                break
            end += len(part)
        end = len(whole[:end].rstrip()) if ending else end
        notes = ()
        if not _last_end(self._renderer.special, whole[begin:end]):
            token = self._renderer.special.search(whole, end)
            if number == len(self._messages) - 1 and token is None:
                whole += self._next_marker(number, {}) or self._renderer.end_of_text
                end = len(whole)
            elif token is not None and not self._shows_next(number, whole[end : token.start()]):
                end = token.end()
            else:
                notes = ("ending without a token to stop at",)
        return Learnable(whole[:begin], whole[begin:end], whole[end:], notes)

    def _shows_next(self, number: int, text: str) -> bool:
        """Return True if ``text`` contains the message after answer ``number``."""
        following = [(message["content"] or "").strip() for message in self._messages[number + 1 : number + 2]]
        return any(words and any(form in text for form in spelled(words)) for words in following)

    def _check_answer(self, number: int, answer: Learnable) -> Learnable:
        """Return the answer with remarks on what the template leaves out of it.

        Raises:
            Malformed: its words or calls are not shown.
        """
        message, text = self._messages[number], answer.learned
        thought, words = thought_and_words(message)
        calls = message.get("tool_calls") or []
        if not any(form in text for form in spelled(words)):
            beside = "words beside a call, which the chat template leaves out"
            raise Malformed(
                f"with {beside}" if calls else "with an answer that the chat template leaves out or changes"
            )
        if missing := next(filter(None, (lacking(call, text) for call in calls)), ""):
            raise Malformed(HIDES_CALLS, missing)
        for arguments in (call["function"].get("arguments") for call in calls):
            shown = text.replace(thought, "").replace(words, "")
            if isinstance(arguments, dict) and str(arguments) in shown and str(arguments) != json.dumps(arguments):
                raise Malformed(HIDES_CALLS, f"{arguments} as JSON")
        if calls and words and text.find(words) > text.find(calls[0]["function"]["name"]):
            raise Malformed("with words beside a call, which the chat template shows behind it")
        notes = answer.notes
        if thought and thought not in text:
            notes += ("whose thought the chat template leaves out",)
        if self._renderer.special.search(words):
            notes += ("with a special token in the text, which is learned where it stands",)
        return answer._replace(notes=notes)

    def _check_prompt(self, before: Sequence[Message], text: str) -> None:
        """Raise Malformed if the prompt ``text`` of the last answer lacks an earlier message of another role.

        Args:
            before: messages before the last answer.
            text: prompt of the last answer.
        """
        for message in before:
            shown = (message["content"] or "").strip()
            if message["role"] != ASSISTANT and not any(form in text for form in spelled(shown)):
                raise Malformed("with a turn that the chat template leaves out", f"of the role {message['role']}")

    def _switches(self) -> Iterator[dict[str, bool]]:
        """Yield variables for the template, one at a time, first True and then False, that switch thinking on or off.

        Their names are found in the text of the template; the shortest comes first. Names in the options of the chat
        are left out."""
        names = dict.fromkeys(SWITCH.findall(self._template))
        for name in sorted(names.keys() - set(SHOWN_AS) - self._options.keys(), key=lambda name: (len(name), name)):
            yield from ({name: True}, {name: False})

    def _asked(self, number: int, **switch: Any) -> str:
        """Return the prompt for message ``number``; for message 0 the text that a template writes before an answer.

        Raises:
            Malformed: the template refuses the messages, or shows no header before message 0.
        """
        if number:
            return self._first_ones(number, asks=True, **switch)
        asked = [{"role": "user", "content": MARK}]
        header = self._render(asked, asks=True, **switch).removeprefix(self._render(asked, asks=False, **switch))
        shown = self._text_through(0, **switch)
        other = self._render([{"role": ASSISTANT, "content": MARK}], asks=False, **switch)
        place = shown[: _alike(shown, other)].rfind(header)
        if place < 0:
            raise Malformed("with an answer that the chat template shows behind no prompt")
        return shown[: place + len(header)]

    def _text_through(self, number: int, **switch: Any) -> str:
        """Return the rendered chat through message ``number``."""
        return self._first_ones(number + 1, asks=False, **switch)

    def _first_ones(self, number: int, *, asks: bool, **switch: Any) -> str:
        """Return the first ``number`` messages rendered; results are kept."""
        key = (number, asks, *switch.items())
        if key not in self._rendered:
            self._rendered[key] = self._render(self._messages[:number], asks=asks, **switch)
        return self._rendered[key]

    def _render(self, messages: Sequence[Message], *, asks: bool, **switch: Any) -> str:
        return self._renderer.apply(messages, self._tools, self._options | switch, asks=asks)


def _last_end(special: re.Pattern[str], text: str) -> int:
    """Return the index after the last special token if only white space follows it, else 0."""
    ends = [token.end() for token in special.finditer(text)]
    return ends[-1] if ends and not text[ends[-1] :].strip() else 0


def _pieces(text: str, spans: Mapping[int, int]) -> Iterator[ChatText]:
    """Yield the text in pieces; those in ``spans`` (begin to end) count in the loss."""
    done = 0
    for begin, end in sorted(spans.items()):
        yield from (
            piece for piece in (ChatText(text[done:begin], False), ChatText(text[begin:end], True)) if piece.text
        )
        done = end
    if done < len(text):
        yield ChatText(text[done:], False)


def _alike(text: str, other: str) -> int:
    """Return the number of leading characters in which both texts are equal."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(text), len(other)))


def _refusals_named(render: Callable[[], Any]) -> Any:
    """Call ``render`` and return its result; an error of the template is raised as Malformed."""
    from jinja2.exceptions import TemplateError

    try:
        return render()
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Malformed("which the chat template refuses", str(error)) from error
