"""Rows as documents: which of their text is learned."""

import copy
from collections.abc import Sequence

from tawpipe.data.chats.columns import Columns, RawRow
from tawpipe.data.chats.render import Document, Renderer
from tawpipe.data.encode import Encoder, Tokens
from tawpipe.data.report import LEFT_NOTHING_OUT
from tawpipe.data.settings import DataSettings


def with_own(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def documents_of(renderer: Renderer, row: RawRow) -> list[Document]:
    """The documents of a row of which nothing is left out."""
    documents = renderer.render(row)
    assert all(isinstance(document, Document) or document.kind in LEFT_NOTHING_OUT for document in documents), documents
    return [document for document in documents if isinstance(document, Document)]


def tokens_of(renderer: Renderer, encoder: Encoder, row: RawRow) -> Tokens:
    return encoded(encoder, documents_of(renderer, row))[0]


def encoded(encoder: Encoder, documents: Sequence[Document]) -> list[Tokens]:
    """The tokens of documents, of chats without those that begin a text, which no template here writes."""
    found = encoder.encode(documents)
    for number, document in enumerate(documents):
        if document.kind == "chat" and (size := len(encoder.begin)):
            ids, counts = found[number]
            assert ids[:size].tolist() == encoder.begin
            found[number] = Tokens(ids[size:], counts[size:])
    return found


def learned(tokenizer, row: dict, *names: str, as_chat: bool = False) -> tuple[str, list[str]]:
    """The row's first document as text, and all that is learned of the row, in the order of a chat."""
    columns = Columns.of(DataSettings(columns=list(names)))
    raw = columns.row("here", row)
    assert isinstance(raw, RawRow), raw
    documents = documents_of(Renderer(tokenizer, columns, as_chat=as_chat), raw)
    parts: list[list[int]] = []
    for tokens in encoded(Encoder(tokenizer), documents)[::-1]:
        last = False
        for token, counts in zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True):
            if counts:
                parts = parts if last else [*parts, []]
                parts[-1].append(token)
            last = counts
    return tokenizer.decode(tokens.ids.tolist()), [tokenizer.decode(part) for part in parts]
