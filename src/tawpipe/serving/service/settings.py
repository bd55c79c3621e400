"""Settings of the service. Without torch, so that wrong settings are refused before a model is loaded."""

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
    """Settings of a service. The string under each field is its help text."""

    model: str = ""
    """Folder of the model: the output folder of a run, or a Hugging Face folder with safetensors."""

    name: str | None = None
    """Name of the model in requests. Unset: the name of its folder."""

    host: str = "127.0.0.1"
    """Address to listen at. Any address other than this machine's own (127.0.0.1, localhost) needs an API key."""

    port: int = bounded(8000, minimum=0, maximum=65535)
    """Port to listen at. 0: a free port, which is printed."""

    api_key_file: str | None = None
    """File whose first line is the API key. Every request must then send `Authorization: Bearer KEY`."""

    chat_template: str | None = None
    """Chat template: chatml, plain, or a file with a Jinja template. Unset: the template of the tokenizer. If it has
    none, completions work and chats are refused."""

    weights: WeightForm = "auto"
    """Number format of the matrices of layers. auto: as in the folder. none: the type given by dtype. int8: 8 bits with
    a scale for each row. w4: 4 bits with a scale for each 128 numbers of a row."""

    compression: Literal["none", "int8"] = "none"
    """Compression of hidden states sent from stage to stage. int8: half of the bytes, with rounding. none: no
    compression."""

    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Type of numbers to compute in. auto: bfloat16 if the devices compute in it or if the weights are quantised, else
    float32."""

    context: int = bounded(open_number(4096), minimum=2)
    """Maximum number of tokens of a prompt and its answer together. Unset: 4096, or the number of positions of the
    model if it has fewer."""

    slots: int = bounded(8, minimum=1)
    """Number of requests that are computed together in one group."""

    groups: int = bounded(open_number(1), minimum=1)
    """Number of groups of requests that follow each other through the stages. Unset: one for each process."""

    chunk: int = bounded(256, minimum=1)
    """Maximum number of prompt tokens that are computed together with the next tokens of other requests."""

    max_tokens: int = bounded(4096, minimum=1)
    """Maximum number of tokens of an answer. Also used for a chat request that sets no maximum."""

    max_waiting: int = bounded(64, minimum=0)
    """Maximum number of requests that wait for a slot. Further requests are refused with status 429."""

    max_body_kib: int = bounded(4096, minimum=1)
    """Maximum size of a request in KiB. Larger requests are refused with status 413."""

    request_s: float = bounded(600.0, above=0)
    """Seconds after which an answer ends with the text it has so far."""

    drain_s: float = bounded(60.0, above=0)
    """Seconds after SIGTERM in which open answers may finish."""

    timeout_s: float = bounded(60.0, minimum=1)
    """Seconds that a process waits for another process before the service ends with an error. While there are no
    requests, the processes exchange an empty pass every tenth of this time, at most every 5 s."""

    nproc: int | None = bounded(None, minimum=1)
    """Number of processes to start here, each with one stage of the model. Unset: one for each GPU, or one without a
    GPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Type of the devices to compute on."""

    max_restarts: int = bounded(0, minimum=0)
    """Number of restarts of the service after a process has died. Not for torchrun, which has its own setting."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def idle_s(self) -> float:
        """Seconds between empty decode steps while there are no requests."""
        return min(IDLE_S, self.timeout_s / 10)

    @property
    def loopback(self) -> bool:
        """True if the service can be reached only from this machine."""
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
    """Parse the arguments of ``tawpipe serve`` and return the checked settings.

    Raises:
        UserError: a setting cannot be parsed or cannot work: no model is set, or the address needs an API key.
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
    """Return the API key from the first line of its file, or None if no file is set.

    Raises:
        UserError: the file cannot be read, or its first line is not a valid key.
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
