"""The settings of the service. Without torch: what cannot work is refused before a model is loaded."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tawpipe.errors import UserError
from tawpipe.options import Options, bounded, open_number
from tawpipe.serving.passes import IDLE_S

WeightForm = Literal["auto", "none", "int8", "w4"]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of a service; the string under each is its help."""

    model: str = ""
    """Folder of a model: the output folder of a run, or a Hugging Face folder with safetensors."""

    name: str | None = None
    """Name of the model in requests. Unset: that of its folder."""

    host: str = "127.0.0.1"
    """Address to listen at. Another one than this machine's own needs an API key."""

    port: int = bounded(8000, minimum=0, maximum=65535)
    """Port to listen at. 0: a free one, which is said."""

    api_key_file: str | None = None
    """File whose first line every request must bring as `Authorization: Bearer KEY`."""

    chat_template: str | None = None
    """Chat template: chatml, plain, or a file with a Jinja template. Unset: the tokenizer's own; without one there are
    completions, but no chats."""

    weights: WeightForm = "auto"
    """Few bits for the matrices of layers. auto: as the folder has them. none: as dtype says. int8: a scale for each
    row. w4: 4 bits, a scale for each 128 numbers of a row."""

    compression: Literal["none", "int8"] = "none"
    """Form of hidden states on their way from stage to stage: int8 halves the bytes, and rounds."""

    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Type of numbers to compute in. auto: bfloat16 where the devices compute in it, or under few bits, else
    float32."""

    context: int = bounded(open_number(4096), minimum=2)
    """Tokens of a prompt and its answer together. Unset: 4096, or as many as the model has positions for."""

    slots: int = bounded(8, minimum=1)
    """Requests of a group: they are computed together."""

    groups: int = bounded(open_number(1), minimum=1)
    """Groups of requests that follow each other through the stages. Unset: one for each process."""

    chunk: int = bounded(256, minimum=1)
    """Tokens of a prompt that are computed beside the others' next tokens, at most."""

    max_tokens: int = bounded(4096, minimum=1)
    """Tokens of an answer at most; also of one that does not say how many it wants."""

    max_waiting: int = bounded(64, minimum=0)
    """Requests that may wait for a slot; more are refused with 429."""

    max_body_kib: int = bounded(4096, minimum=1)
    """KiB of a request at most; more are refused with 413."""

    request_s: float = bounded(600.0, above=0)
    """Seconds after which an answer ends with what it has."""

    drain_s: float = bounded(60.0, above=0)
    """Seconds after SIGTERM in which open answers may end."""

    timeout_s: float = bounded(60.0, minimum=1)
    """Seconds that a process waits for another before the service ends with an error. While nobody asks, an empty pass
    goes round in a tenth of it, at most every 5 s."""

    nproc: int | None = bounded(None, minimum=1)
    """Processes to start here: a stage of the model on each. Unset: one for each GPU, else one."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Devices to compute on."""

    max_restarts: int = bounded(0, minimum=0)
    """How often the service starts again after a process has died; not with torchrun, which has its own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def idle_s(self) -> float:
        """Seconds between the laps of a service that nobody asks."""
        return min(IDLE_S, self.timeout_s / 10)

    @property
    def loopback(self) -> bool:
        """True if only this machine can ask."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


OPTIONS: Options[ServeConfig] = Options(
    ServeConfig,
    prog="tawpipe serve",
    description="Serves a model over HTTP with OpenAI's interface, in one process or split into stages over several. "
    "vLLM is faster where a model fits one machine: docs/serving.md.",
)


def load(argv: Sequence[str]) -> ServeConfig:
    """The settings of a command line.

    Raises:
        UserError: one that cannot be read, or cannot work.
    """
    config = OPTIONS.parse(argv)
    for leaf in OPTIONS.leaves.values():
        leaf.check(getattr(config, leaf.path[0]))
    if not config.model:
        raise UserError("--model", config.model, "the folder of a model")
    if not config.loopback and config.api_key_file is None:
        expected = "127.0.0.1 or localhost; any address with --api-key-file FILE, where requests need the key"
        raise UserError("--host", config.host, expected)
    return config


def read_key(config: ServeConfig) -> str | None:
    """The API key, or None where there is none.

    Raises:
        UserError: the file cannot be read, or its first line is no key.
    """
    if config.api_key_file is None:
        return None
    expected = "a file whose first line is the key: at least 16 letters, digits and signs without blanks"
    try:
        key = Path(config.api_key_file).expanduser().read_text(encoding="ascii").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError("--api-key-file", config.api_key_file, f"{expected} ({reason})") from error
    if len(key) < 16 or not key.isprintable() or " " in key:
        raise UserError("--api-key-file", config.api_key_file, expected)
    return key
