"""Model of a run, which is built once and passed to all code that needs it."""

from __future__ import annotations

from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import BuiltModel, build_model, config_of, resolve_model
from tawpipe.model.files.pretrained import has_weights
from tawpipe.model.refuse import settle_mtp
from tawpipe.pipeline.setup import refuse_cut_rows
from tawpipe.train.settings.config import TrainConfig


class RunModel:
    """Model of a run on the meta device, as the settings ask for it.

    A folder describes its model completely, so this model is built at once, before documents are read. A preset takes
    its vocabulary from the tokenizer and is built later, by ``followed``.

    Raises:
        UserError: the model cannot be trained with these settings, as far as that is known before documents are read.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self.folder = config, resolve_model(config.model)
        self.pretrained = self.folder is not None and has_weights(self.folder)
        self._followed: tuple[BuiltModel, Chain] | None = None
        self.balance_words = ""
        """Sentence about the loss that balances experts, or ``""``; complete after ``followed``."""
        if config.rope.changes:
            self.check(None, 1)
        if config.lora.active and not self.pretrained:
            expected = "a model with weights: an adapter on random weights is useless later"
            raise UserError("--model", config.model, expected)
        if self.folder is not None:
            self.followed(None)
        elif config.freeze:  # check the patterns now: names do not depend on the vocabulary
            _ = _build(config, None)

    def followed(self, vocab_size: int | None) -> tuple[BuiltModel, Chain]:
        """Build the model on the first call, and return it with its chain of blocks.

        Args:
            vocab_size: vocabulary size of the tokenizer, for a preset; None if the model has its own.
        """
        if self._followed is None:
            built = _build(self._config, vocab_size)
            chain = Chain(built.model)
            settle_mtp(chain.model, without=self._config.without_mtp)
            self.balance_words = chain.balance_experts(self._config.experts.balance)
            refuse_cut_rows(chain, self._config.schedule)
            self._followed = built, chain
        return self._followed

    def check(self, vocab_size: int | None, longest: int) -> None:
        """Raise UserError if the tokenizer or the longest document does not fit the model.

        Args:
            vocab_size: vocabulary size of the tokenizer; None if it is not known.
            longest: tokens of the longest document; 1 if it is not known yet.
        """
        config = self._config
        row, code = config.document_tokens, config.trust_remote_code
        _ = config_of(config.model, self.folder, vocab_size, row, longest, config.rope, code)


def _build(config: TrainConfig, vocab_size: int | None) -> BuiltModel:
    """Build the model that the settings name, on the meta device."""
    return build_model(
        config.model,
        vocab_size=vocab_size,
        max_positions=config.document_tokens,
        longest=1,
        rope=config.rope,
        lora=config.lora,
        frozen=config.freeze,
        trust_remote_code=config.trust_remote_code,
    )
