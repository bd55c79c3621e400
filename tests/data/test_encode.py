"""Documents to tokens, piece by piece: no letter is added and none is lost."""

import pytest

from chat_families import FAMILIES, TRAINED
from tawpipe.data.encode import Encoder
from tawpipe.data.render import ChatText, Document


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("breaks", range(7))
@pytest.mark.parametrize("text", ["c", "", " c", "\tc", "é", "\ue000"])
def test_no_line_break_of_an_answer_is_lost(name, breaks, text):
    """Tokenizers of this form put a space before a text; in its middle none is added and nothing is taken away."""
    tokenizer, *_ = FAMILIES[name]
    answer = "\n" * breaks + text
    if not answer:
        return
    document = Document("instruction", (ChatText("a b", False), ChatText(answer, True)))
    (found,) = Encoder(tokenizer).encode([document])
    plain = tokenizer("a b" + answer, add_special_tokens=False)["input_ids"]
    ids = found.ids.tolist()[:-1]
    assert tokenizer.decode(ids) == tokenizer.decode(plain)
    assert tokenizer.decode([one for one, counts in zip(ids, found.counts, strict=False) if counts]) == answer


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_prompt_begins_as_documents_do(name):
    """With the token that begins a text, if documents have it, and never with two."""
    for tokenizer in (FAMILIES[name][0], TRAINED):
        for text in ("a number", "", "\n\na"):
            for given in (text, f"{tokenizer.bos_token or ''}{text}"):
                encoder = Encoder(tokenizer)
                (found,) = encoder.encode([Document("text", (ChatText(given + "b", True),))])
                begins = found.ids.tolist()[:1] == [tokenizer.bos_token_id]
                ids = encoder.beginning(given)
                assert sum(one == tokenizer.bos_token_id for one in ids) == begins
                alone, whole = (str(tokenizer.decode(some)) for some in (ids, encoder.beginning(given + "b")))
                assert alone.lstrip(" ") == whole.removesuffix("b").lstrip(" ")
    assert Encoder(TRAINED).beginning("a")[0] == TRAINED.bos_token_id
