"""Tokenizers: loaded, or trained so that equal files give equal tokens on every machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tawpipe.data.chats.render import raw_text
from tawpipe.data.chats.templates import HASHED, fallback_template
from tawpipe.data.reading.cache import content_hash
from tawpipe.data.reading.read import RowReader
from tawpipe.data.reading.sources import SourceFile
from tawpipe.data.report import Skipped
from tawpipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
"""The only special token of a tokenizer that is trained here: it begins a text, ends it and pads. A model that has seen
it before every document can generate text from nothing, and padding never counts, so one token is enough."""

TRAINING_BYTES = 8 << 20
"""Most bytes of text on which a tokenizer is trained; more takes longer and hardly changes the merges."""

CHUNK_BYTES = 64 << 10
"""Bytes taken from one position of a larger corpus; positions are evenly spaced over all bytes of all files."""

UNBROKEN = re.compile(r"\S{1024,}|\s{1024,}")
"""Long runs without words (encoded data, padding). They are removed, because training time is quadratic in the length
of a word."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)

BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Files that belong to a tokenizer.json in their folder."""

PROBES = [
    "Hello World, DON'T  do it.\n\n\tif x_1 == 12345.67: return  HTTPServer()   \r\n",
    " \u00c0 la carte \ufb01ve \u00bd cafe\u0301 \u201cno\u201d \u2026\u00a0",
    "\u6f22\u5b57\u3042\u3002\ud55c\uad6d \u0440\u0443\u0441 \u0e44\u0e17\u0e22 \U0001f642\u200d\U0001f525 ",
]
"""Texts that distinguish tokenizers: cases, digits, white space, symbols, and letters that normalizers change."""

END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]")
"""Names of the end-of-text token, for a tokenizer.json without any configuration."""


def load_tokenizer(name: str, setting: str = "--tokenizer") -> PreTrainedTokenizerBase:
    """Load the tokenizer from a folder, a tokenizer.json, or a Hub name; it gives the ids of tokenizer.json.

    Raises:
        UserError: there is no tokenizer, or it cannot be read.
    """
    return load_with_class(name, setting)[0]


def load_with_class(name: str, setting: str = "--tokenizer") -> tuple[PreTrainedTokenizerBase, str]:
    """Load a tokenizer and check its class against tokenizer.json.

    A single tokenizer.json that names no end-of-text or beginning-of-text token gets usual ones if it has them.

    Args:
        name: a folder, a tokenizer.json, or a Hub name, with ``@REVISION`` if needed.
        setting: setting that names it, for errors.

    Returns:
        The tokenizer, and ``""``. If the class named in its config gives other ids than tokenizer.json, the tokenizer
        of tokenizer.json and the name of that class.

    Raises:
        UserError: there is no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(name).expanduser()
    try:
        if path.is_file():
            beside = [path.parent / name for name in BESIDE_TOKENIZER if (path.parent / name).exists()]
            if path.name == "tokenizer.json" and path.parent / "tokenizer_config.json" in beside:
                return load_with_class(str(path.parent), setting)
            if path.name == "tokenizer.json" and beside:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent))
            else:
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            known = tokenizer.get_vocab()
            if tokenizer.eos_token is None:
                tokenizer.eos_token = next((token for token in END_OF_TEXT_NAMES if token in known), None)
            first = tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"][:1])  # pyright: ignore[reportArgumentType]
            if tokenizer.bos_token is None:
                tokenizer.bos_token = next((token for token in first if token in tokenizer.added_tokens_encoder), None)
            return tokenizer, ""
        place, _, revision = (str(path), "", "") if path.is_dir() else name.partition("@")
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision or "main")
        if _has_ids_of_file(tokenizer, place, revision or "main"):
            return tokenizer, ""
        return PreTrainedTokenizerFast.from_pretrained(place, revision=revision or "main"), type(tokenizer).__name__
    except Exception as error:  # the libraries raise any class, even Exception itself
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            setting, name, f"a folder with a tokenizer, a tokenizer.json, or a Hub name that can be reached ({reason})"
        ) from error


def _has_ids_of_file(tokenizer: PreTrainedTokenizerBase, place: str, revision: str) -> bool:
    """Return False if the file tokenizer.json exists and gives other ids for ``PROBES`` than ``tokenizer``."""
    from huggingface_hub import try_to_load_from_cache
    from transformers import PreTrainedTokenizerFast

    name = "tokenizer.json"
    file = Path(place, name) if Path(place).is_dir() else try_to_load_from_cache(place, name, revision=revision)
    if not isinstance(file, str | Path) or not Path(file).exists():
        return True
    plain = PreTrainedTokenizerFast(tokenizer_file=str(file))
    ids, wanted = (each(PROBES, add_special_tokens=False)["input_ids"] for each in (tokenizer, plain))
    return ids == wanted


def has_tokenizer(folder: str) -> bool:
    """Return True if ``folder`` holds a tokenizer."""
    return any((Path(folder).expanduser() / name).exists() for name in TOKENIZER_FILES)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, setting: str = "--tokenizer") -> None:
    """Raise UserError if an id of the tokenizer is not below ``vocab_size``, the rows of the model's embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise UserError(
            setting,
            tokenizer.name_or_path or f"a tokenizer of {len(tokenizer):,} tokens",
            f"one whose tokens lie below the model's vocab_size of {vocab_size:,}; its largest is {largest:,}",
        )


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the smallest number of embedding rows that has one for every token."""
    return max(tokenizer.get_vocab().values()) + 1


def stops_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a text, sorted: the tokenizer's end-of-text token and those in the generation config."""
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return sorted({token for token in ids if isinstance(token, int)})


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that determines the tokens of a document."""
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerFast):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        for state in ("truncation", "padding"):  # state of an earlier call
            content.pop(state, None)
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab()]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return content_hash(content, special, tokenizer.chat_template or HASHED[fallback_template(tokenizer)])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode every text; equal texts give equal tokenizers.

    It places its only special token, ``END_OF_TEXT``, before every text. Very long runs without words (``UNBROKEN``)
    are not trained on.

    Args:
        texts: training texts.
        vocab_size: most tokens of the vocabulary; a small corpus may give fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((UNBROKEN.sub(" ", text) for text in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def sample_texts(files: Sequence[SourceFile], reader: RowReader, limit: int = TRAINING_BYTES) -> Iterator[str]:
    """Yield text of the files: all if it has up to ``limit`` bytes, else chunks from evenly spaced positions."""
    total = sum(file.size for file in files)
    if total <= limit:
        for file in files:
            yield from _texts(file, reader, 0.0, limit)
        return
    places = max(1, limit // CHUNK_BYTES)
    wanted = [int((place + 0.5) * total / places) for place in range(places)]
    begin = 0
    for file in files:
        here = [(place - begin) / file.size for place in wanted if begin <= place < begin + file.size]
        begin += file.size
        if not file.seekable and here:
            yield from _texts(file, reader, 0.0, CHUNK_BYTES * len(here))
        elif file.format == "text":
            yield from _chunks(file, here)
        else:
            for share in here:
                yield from _texts(file, reader, share, CHUNK_BYTES)


def _texts(file: SourceFile, reader: RowReader, start: float, limit: int) -> Iterator[str]:
    """Yield text of documents from the fraction ``start`` of the file on, up to ``limit`` characters."""
    for row in reader.read(file, start):
        if isinstance(row, Skipped):
            continue
        text = raw_text(row)[:limit].encode("utf-8", "ignore").decode()
        yield text
        limit -= len(text)
        if limit <= 0:
            return


def _chunks(file: SourceFile, shares: Iterable[float]) -> Iterator[str]:
    """Yield a chunk of a text file at each of ``shares``, which are fractions of its size.

    Stops if the file cannot be read.
    """
    try:
        with Path(file.path).open("rb") as stream:
            for share in shares:
                stream.seek(max(0, min(int(share * file.size), file.size - CHUNK_BYTES)))
                yield stream.read(CHUNK_BYTES).decode("utf-8", "ignore")
    except OSError:
        return
