"""Command line of ``tawpipe lab``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.options import CommandParser
from tawpipe.report.site import Page
from tawpipe_lab.cluster.cluster import DEFAULT_NAME, Cluster
from tawpipe_lab.cluster.rates import format_rate, parse_rates

LINE = "make a cluster with unequal links out of one machine, and measure in it"
RESULTS = "results.json"
MESSAGES = (100_000, 1_000_000)
"""Sizes in bytes of the messages with which the links of a new cluster are measured."""


def run(argv: Sequence[str]) -> int:
    """Run the subcommand of ``tawpipe lab`` that ``argv`` names, and return the exit code."""
    words, command = _split(argv)
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.run is not _exec and command:
        raise UserError("--", " ".join(command), f"nothing, because `tawpipe lab {arguments.command}` runs no command")
    arguments.words = command
    return arguments.run(arguments)


def pages(folder: Path) -> Iterator[Page]:
    """Yield the page of a folder with results of ``tawpipe lab compare``, for ``tawpipe open``.

    Yields nothing if the folder has no results.
    """
    if (folder / RESULTS).is_file():
        line = "Strategies side by side: seconds, bytes and memory of every cell."
        yield Page("compare.html", "Comparison", line, partial(_comparison, folder))


def check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``checks`` to the parser of ``tawpipe prove``."""
    help_text = "file with your own loop, which --only rivals times beside ours and FSDP2; see docs/gpu.md"
    parser.add_argument("--rival", metavar="FILE", help=help_text)


def checks(arguments: argparse.Namespace) -> list[Any]:
    """Return the checks for ``tawpipe prove --only NAME``.

    Raises:
        UserError: ``--rival`` is no file, or ``--only`` does not name the check that reads it.
    """
    from tawpipe.prove.checks import Check
    from tawpipe_lab.versus.check import rivals
    from tawpipe_lab.versus.page import rivals_page

    file = arguments.rival or ""
    if file and not (Path(file).is_file() and "rivals" in arguments.only):
        raise UserError("--rival", file, "a Python file with build(task) -> step(ids) -> loss, beside --only rivals")
    sentence = "our strategies and FSDP2 train alike; seconds, bytes and memory stand side by side"
    return [Check("rivals", sentence, partial(rivals, file=file), needs=("several",), keeps=True, page=rivals_page)]


def _comparison(folder: Path) -> str:
    """Return the HTML page of the results in ``folder``.

    Raises:
        UserError: the results cannot be read.
    """
    from tawpipe_lab.compare import TRACES
    from tawpipe_lab.page import compare_page

    path = folder / RESULTS
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
        name = rows[0]["suite"]
        recordings = folder / TRACES if any((folder / TRACES).glob("*/rank-*.json")) else None
        return compare_page(name, content["environment"], rows, recordings)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError("PATH", str(path), f"results that `tawpipe lab compare` wrote ({error!r})") from error


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before ``--`` for this program, and the user's command after ``--``."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _up(arguments: argparse.Namespace) -> int:
    """Create a cluster that stays, measure its links, and print both; return 0."""
    asked = {"rate": arguments.rate, "latency": arguments.latency, "name": arguments.name}
    cluster = Cluster.up(arguments.nodes, **asked)
    rates = parse_rates(arguments.rate, nodes=arguments.nodes)
    for node, (namespace, address, rate) in enumerate(zip(cluster.nodes, cluster.addresses, rates, strict=True)):
        print(f"node {node}: namespace {namespace}, address {address}, link {format_rate(rate)}")
    if (links := cluster.links(MESSAGES)) is not None:
        print(f"the links carry {links}")
        if links.trouble:
            print(f"this machine cannot make them as asked: {links.trouble}")
    named = "" if cluster.name == DEFAULT_NAME else f" --name {cluster.name}"
    print(
        f"`tawpipe lab exec{named} 0 -- COMMAND` runs a command in node 0; `tawpipe lab down{named}` removes them all"
    )
    return 0


def _down(arguments: argparse.Namespace) -> int:
    """Remove a cluster and end its processes, and print whether it existed; return 0."""
    existed = Cluster.remove(arguments.name)
    print(f"cluster {arguments.name} removed" if existed else f"there is no cluster {arguments.name}")
    return 0


def _exec(arguments: argparse.Namespace) -> int:
    """Replace this process by the user's command inside a node. Does not return.

    Raises:
        UserError: no command is given, or there is no such cluster, node or program.
    """
    if not arguments.words:
        raise UserError("COMMAND", "nothing", "a command behind --, as in `tawpipe lab exec 0 -- ip address`")
    return Cluster.find(arguments.name).become(arguments.node, arguments.words)


def _compare(arguments: argparse.Namespace) -> int:
    """Measure all strategies of a suite, and print where the results are; return 0.

    Raises:
        UserError: the suite, ``--only`` or ``--samples`` cannot work.
    """
    from tawpipe_lab.compare import compare
    from tawpipe_lab.suite import load_suite

    suite = load_suite(arguments.suite)
    if arguments.only:
        suite = suite.only([name.strip() for name in arguments.only.split(",")])
    if arguments.samples is not None:
        if arguments.samples < 1:
            raise UserError("--samples", arguments.samples, "at least 1")
        suite = replace(suite, samples=arguments.samples)
    tell = partial(print, flush=True)
    rows = compare(suite, Path(arguments.out), traces=arguments.traces, resume=arguments.resume, tell=tell)
    print(f"{len(rows)} rows in {arguments.out}: results.json, table.md; `tawpipe open {arguments.out}` draws them")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Build the argument parser of ``tawpipe lab``."""
    description = "A cluster with unequal links out of one Linux machine. Needs root and iproute2."
    parser = CommandParser(prog="tawpipe lab", description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    up = commands.add_parser("up", help="make a cluster; one of the same name is replaced, with what runs in it")
    up.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes (default: 3)")
    up.add_argument(
        "--rate",
        default="400mbit",
        help="of each node's link, both ways: 400mbit; one for each node: 400mbit,200mbit,400mbit; or none "
        "(default: 400mbit)",
    )
    up.add_argument(
        "--latency", metavar="TIME", help="of a message between nodes: 5ms (default: what the machine takes)"
    )
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="remove a cluster, or what is left of it, and end what runs in it")
    down.set_defaults(run=_down)

    execute = commands.add_parser(
        "exec",
        help="run a command in a node",
        usage="%(prog)s [-h] [--name NAME] NODE -- COMMAND [WORD ...]",
        description="Runs a command in a node, with GLOO_SOCKET_IFNAME and MASTER_ADDR set; passes its exit code on.",
    )
    execute.add_argument("node", type=int, metavar="NODE", help="its number, from 0")
    execute.set_defaults(run=_exec)

    compare = commands.add_parser("compare", help="measure a suite: strategies side by side, with their bounds")
    compare.add_argument("--suite", required=True, help="a name (smoke, base-6, link-bound, ...) or a YAML file")
    compare.add_argument("--only", metavar="NAMES", help="strategies or cells, separated by commas")
    compare.add_argument("--samples", type=int, metavar="N", help="measured steps, instead of the suite's")
    compare.add_argument("--out", required=True, metavar="DIR", help="folder for results.json and table.md")
    compare.add_argument("--traces", action="store_true", help="record a step of every strategy in our runtime")
    compare.add_argument(
        "--resume", action="store_true", help="keep the cells that --out holds of an earlier run, measure the others"
    )
    compare.set_defaults(run=_compare)

    for command in (up, down, execute):
        command.add_argument("--name", default=DEFAULT_NAME, help=f"of the cluster (default: {DEFAULT_NAME})")
    return parser
