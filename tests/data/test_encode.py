"""Documents to tokens, piece by piece: no letter is added and none is lost."""

import pytest
from tokenizers import processors
from transformers import AddedToken

from chat_families import FAMILIES, TRAINED
from letters import letters
from tawpipe.data.chats.render import ChatText, Document
from tawpipe.data.encode import Encoder


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("breaks", range(7))
@pytest.mark.parametrize("text", ["c", "", " c", "\tc", "é", "\ue000"])
def test_line_breaks_in_answers_survive_tokenization(name, breaks, text):
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
def test_prompt_begins_with_the_tokens_of_a_document(name):
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


@pytest.mark.parametrize("strips", [False, True])
def test_tokens_around_a_special_token_equal_those_of_the_whole_text(strips):
    tokenizer = letters()
    mark = AddedToken("<|turn|>", rstrip=strips, special=True, normalized=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    pieces = [("<|turn|>", False), ("\n Hi<|turn|>", True), ("\nand<|turn|>", False), (" so", True)]
    (found,) = Encoder(tokenizer).encode([Document("chat", tuple(ChatText(*each) for each in pieces), complete=True)])
    whole = tokenizer("".join(text for text, _ in pieces), add_special_tokens=False)["input_ids"]
    assert found.ids.tolist() == whole
    learned = tokenizer.decode([one for one, counts in zip(whole, found.counts, strict=True) if counts])
    assert learned == ("Hi<|turn|>so" if strips else "\n Hi<|turn|> so")


def test_text_begins_with_all_tokens_that_the_tokenizer_adds():
    tokenizer = letters("<pre>", begin="<s>")
    special = [(name, tokenizer.get_vocab()[name]) for name in ("<pre>", "<s>")]
    begun = processors.TemplateProcessing(single="<pre> <s> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = begun
    (found,) = Encoder(tokenizer).encode([Document("text", (ChatText("so", True),))])
    assert found.ids.tolist()[:-1] == tokenizer("so")["input_ids"]
