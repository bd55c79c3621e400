"""The families that the tests compare with the plain model; others are checked before the first step (``check``)."""

TESTED_TRANSFORMERS = "5.23"
TESTED_FAMILIES: frozenset[str] = frozenset({"llama"})
