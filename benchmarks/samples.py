"""Samples in training over slow links: weights that go to stages once, beside an evaluation for every token.

    python benchmarks/samples.py --out benchmarks/results/DATE-samples    # about three minutes; needs root

Two nodes in namespaces, with a link of 100 Mbit/s each, train a Llama. Between steps they write texts behind some
prompts: by ``Pipeline.generate``, twice, as the first call makes its connections; and in the way of before, by an
evaluation for every token, for which all weights travel. Both draw with the same seeds. Bytes are those that all nodes
have sent, by the counters of their interfaces, with everything else that the call sends; a copy is all weights once as
they travel. Writes ``results.json`` and ``table.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings
from tawpipe.pipeline.steps import Continuation
from tawpipe.serving.generate import Wanted, by_evaluation
from tawpipe.serving.passes import Sampling
from tawpipe_lab.cluster.cluster import Cluster, own_traffic

SEED, TEMPERATURE, ROWS = 7, 0.8, 8
WAYS = "generate, first call", "generate, second call", "an evaluation for every token"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rate", default="100mbit", help="of every node's link (%(default)s)")
    parser.add_argument("--local", type=int, default=1, help="processes of a node (%(default)s)")
    parser.add_argument("--strategy", default="tawpipe-spread", help="of training (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows computed at once (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="texts (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="of each (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="to add to each (%(default)s)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> LlamaConfig:
    """The model: like the preset ``tiny`` by default."""
    return LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=11 * args.hidden // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


class Trained:
    """A run whose calls are measured; on every rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM(config_of(args))
        self.pipeline = Pipeline(
            model,
            dtype=torch.float32,
            schedule=args.strategy,
            micro_batch=args.micro_batch,
            checks=CheckSettings(check="never"),
        )
        numbers = torch.Generator().manual_seed(SEED)
        ids = torch.randint(args.vocabulary, (ROWS, 64), generator=numbers)
        self._batch = {"input_ids": ids, "labels": ids}
        shape = args.prompts, args.prompt_tokens
        self.prompts = torch.randint(args.vocabulary, shape, generator=numbers).tolist()

    def step(self) -> None:
        self.pipeline.step(self._batch)

    def measured(self, write: Callable[[], list[Continuation]]) -> dict[str, Any]:
        """Seconds of a call, the bytes that all nodes have sent in it, and its texts."""
        world = self.pipeline.world
        self.pipeline.drain()
        world.barrier()
        before, begin = own_traffic(), time.perf_counter()
        texts = write()
        world.barrier()
        seconds, sent = time.perf_counter() - begin, (own_traffic() - before).sent
        of_ranks = world.gather_numbers(float(sent))
        nodes = {world.topology.node_of(rank): sent for rank, sent in enumerate(of_ranks)}
        return {"seconds": seconds, "sent": list(nodes.values()), "texts": [list(text.ids) for text in texts]}


def work(args: argparse.Namespace) -> None:
    """A rank of the run."""
    run = Trained(args)
    pipeline = run.pipeline
    drawn: dict[str, Any] = {"temperature": TEMPERATURE, "seed": SEED}
    wanted = Wanted(run.prompts, args.tokens, Sampling(TEMPERATURE, seed=SEED), frozenset())
    ways: list[dict[str, Any]] = []
    run.step()
    for _ in range(2):
        # The same weights for all three ways: the texts can be compared.
        ways.append(run.measured(lambda: pipeline.generate(run.prompts, args.tokens, **drawn)))
    ways.append(run.measured(lambda: by_evaluation(pipeline, wanted)))
    run.step()
    pipeline.drain()
    if pipeline.world.rank == 0:
        weights = sum(unit.numel for unit in pipeline.chain.units) * pipeline.dtype.itemsize
        parameters = pipeline.spec.identity["parameters"]
        content = {"weights": weights, "parameters": parameters, "ways": dict(zip(WAYS, ways, strict=True))}
        (args.out / "readings.json").write_text(json.dumps(content), encoding="utf-8")
    pipeline.close()


def table(content: dict[str, Any]) -> str:
    """The results as a page."""
    asked, weights, ways = content["settings"], content["weights"], content["ways"]
    before = ways[WAYS[-1]]
    lines = [
        "# Samples in training over slow links",
        "",
        f"`{content['command']}`, {content['date']}, {content['machine']}, torch {content['torch']}, transformers "
        f"{content['transformers']}.",
        "",
        f"A Llama of {content['parameters']:,} parameters in fp32 ({weights / 1e6:.1f} MB, tied ends), trained by "
        f"`{asked['strategy']}` in micro-batches of {asked['micro_batch']} rows on 2 nodes x {asked['local']} with "
        f"links of {asked['rate']}. Between two steps "
        f"{asked['prompts']} prompts of {asked['prompt_tokens']} tokens get {asked['tokens']} tokens each. Activations "
        f"on the way between stages are {content['activations'] / 1e6:.2f} MB of that.",
        "",
        "| way | s | times as fast | ms for a token of all texts | MB sent by all nodes | copies of the weights "
        "| the same texts |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, way in ways.items():
        same = sum(a == b for a, b in zip(way["texts"], before["texts"], strict=True))
        sent = sum(way["sent"])
        lines.append(
            f"| {name} | {way['seconds']:.2f} | {before['seconds'] / way['seconds']:.1f} "
            f"| {1e3 * way['seconds'] / asked['tokens']:.0f} | {sent / 1e6:.1f} | {sent / weights:.2f} "
            f"| {same} of {len(way['texts'])} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    args = arguments()
    if args.worker:
        work(args)
        return 0
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "worker")}
    shown = ["DIR" if str(args.out) == word else word for word in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="tawpipe-samples-") as folder:
        options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, __file__, "--worker", *options, "--out", folder]
        with Cluster.create(2, rate=args.rate, name="tawpipe-samples") as cluster:
            cluster.launch(command, local=args.local, timeout_s=600)
        content = json.loads(Path(folder, "readings.json").read_text())
    positions = args.prompts * (args.prompt_tokens + args.tokens)
    content |= {
        "settings": settings,
        "activations": positions * args.hidden * 4 * (2 * args.local - 1),
        "command": shlex.join(["python", "benchmarks/samples.py", *shown]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = table(content)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
