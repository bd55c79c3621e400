"""Documents to tokens, piece by piece: no letter is added and none is lost."""

import pytest

from chat_families import FAMILIES
from tawpipe.data.encode import Encoder
from tawpipe.data.render import Document, Piece


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("breaks", range(7))
@pytest.mark.parametrize("text", ["c", "", " c", "\tc", "é", "\ue000"])
def test_no_line_break_of_an_answer_is_lost(name, breaks, text):
    """Tokenizers of this form put a space before a text; in its middle none is added and nothing is taken away."""
    tokenizer, *_ = FAMILIES[name]
    answer = "\n" * breaks + text
    if not answer:
        return
    document = Document("instruction", (Piece("a b", False), Piece(answer, True)))
    (found,) = Encoder(tokenizer).encode([document])
    plain = tokenizer("a b" + answer, add_special_tokens=False)["input_ids"]
    ids = found.ids.tolist()[:-1]
    assert tokenizer.decode(ids) == tokenizer.decode(plain)
    assert tokenizer.decode([one for one, counts in zip(ids, found.counts, strict=False) if counts]) == answer
