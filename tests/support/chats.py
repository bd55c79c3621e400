"""Rows as documents: which of their text is learned."""

import copy

from tawpipe.data.columns import Columns, RawRow
from tawpipe.data.encode import Encoder, Tokens
from tawpipe.data.render import Document, Renderer
from tawpipe.data.settings import DataSettings


def with_own(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def tokens_of(renderer: Renderer, encoder: Encoder, row: RawRow) -> Tokens:
    (document,) = renderer.render(row)
    assert isinstance(document, Document), document
    return encoder.encode([document])[0]


def learned(tokenizer, row: dict, *names: str, as_chat=False) -> tuple[str, list[str]]:
    """The row as text, and the texts between what does not count."""
    columns = Columns.of(settings := DataSettings(columns=list(names)))
    raw = columns.row("here", row)
    assert isinstance(raw, RawRow), raw
    tokens = tokens_of(Renderer(tokenizer, settings.column_names(), as_chat=as_chat), Encoder(tokenizer), raw)
    parts, last = [], False
    for token, counts in zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True):
        if counts:
            parts = parts if last else [*parts, []]
            parts[-1].append(token)
        last = counts
    return tokenizer.decode(tokens.ids.tolist()), [tokenizer.decode(part) for part in parts]
