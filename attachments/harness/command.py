"""The command `harness`: serves a model and adapters, evaluates each with a harness, and shows all side by side."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
from anyio.abc import Process
from rich.console import Console
from rich.table import Table

from attachments.harness.harnesses import HARNESSES, Harness, HarnessError, HarnessRequest, HarnessValue
from protocols.errors import ProfileError, visible
from training_run.commands.command_line import CommandParser
from training_run.profile.command_profiles import ServeArguments, load_serving
from training_run.records.terminal_text import print_line
from training_run.supervision.child_process import end_child, start_child

BASE = "base"
"""Name of the model without an adapter, in requests and in the table."""

POLL_SECONDS, MAX_ERROR = 0.2, 400
"""Pause between two questions whether the server is ready, and characters of an output that an error shows."""


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser(
        "harness",
        "Evaluate a model and adapters with another project's harness. Flags behind -- are the harness's own.",
    )
    found.add_argument("name", choices=list(HARNESSES), help="lm-eval or inspect, each in the version that you install")
    found.add_argument(
        "--tasks", required=True, help="tasks of the harness, separated by commas; for inspect also files"
    )
    found.add_argument("--profile", default="", help="profile whose model and server settings apply")
    found.add_argument("--model", default="", help="model; default: that of the profile")
    found.add_argument("--adapter", action="append", default=[], metavar="[NAME=]PATH", help="repeat it for more")
    found.add_argument("--no-base", action="store_true", help="leave out the model without an adapter")
    found.add_argument("--limit", type=int, default=0, help="problems per task; 0: all")
    found.add_argument(
        "--chat", action="store_true", help="lm-eval: send conversations (inspect always does); no log-probabilities"
    )
    found.add_argument("--concurrency", type=int, default=32, help="requests at once")
    found.add_argument("--python", default=sys.executable, help="interpreter that has the harness; default: this one")
    found.add_argument("--output", type=Path, help="new directory for the files of the harness; default: none is kept")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Run the command. Raises ClothoError if an input cannot be used, or the harness fails."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    chosen = parser().parsed(words[:place], console)
    if chosen is None:
        return 0
    harness = HARNESSES[chosen.name]
    require_harness(harness, chosen.python)
    serving = serving_flags(chosen)
    arguments = load_serving(serving)
    if chosen.output is not None and chosen.output.exists():
        raise ProfileError(f"--output: {visible(str(chosen.output), 200)} exists: name a new directory")
    with tempfile.TemporaryDirectory(prefix="clotho-harness-") as scratch:
        results = chosen.output or Path(scratch) / "results"
        results.mkdir(parents=True)
        found = anyio.run(evaluate, harness, chosen, serving, arguments, results, tuple(words[place + 1 :]), console)
    console.print(table(found))
    return 0


def require_harness(harness: Harness, interpreter: str) -> None:
    """Raise ProfileError if an interpreter cannot import a harness."""
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({harness.module!r}) is None)"
    try:
        status = subprocess.run([interpreter, "-c", check], capture_output=True, check=False).returncode
    except OSError as error:
        raise ProfileError(f"--python: {visible(interpreter, 200)}: {error.strerror}") from error
    if status:
        raise ProfileError(
            f"{visible(interpreter, 200)} has no {harness.module}: pip install '{harness.package}' in an environment "
            "of its own, and name its interpreter with --python"
        )


def serving_flags(chosen: argparse.Namespace) -> list[str]:
    """Return the flags of `serve` for the chosen model and adapters, on a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    named = [word if "=" in word else f"adapter={word}" for word in chosen.adapter]
    flags = {"--profile": chosen.profile, "--model": chosen.model, "--server.port": str(port)}
    words = [word for flag, value in flags.items() if value for word in (flag, value)]
    return [*words, *(word for one in named for word in ("--adapter", one))]


async def evaluate(
    harness: Harness,
    chosen: argparse.Namespace,
    serving: Sequence[str],
    arguments: ServeArguments,
    results: Path,
    flags: tuple[str, ...],
    console: Console,
) -> Mapping[str, Sequence[HarnessValue]]:
    """Evaluate every policy on one server, one after another, and return their numbers."""
    found: dict[str, Sequence[HarnessValue]] = {}
    names = {} if chosen.no_base else {BASE: "policy"}
    names |= {name: name for name in arguments.adapters}
    if not names:
        raise ProfileError("--no-base leaves nothing to evaluate: name an --adapter")
    async with server(serving, arguments.profile.server.port, results / "serve.log") as context:
        for name, model in names.items():
            print_line(console, f"{chosen.name} evaluates {name} ...")
            request = HarnessRequest(
                url=f"http://127.0.0.1:{arguments.profile.server.port}/v1",
                model=model,
                directory=results / name,
                tasks=tuple(filter(None, chosen.tasks.split(","))),
                chat=chosen.chat,
                limit=chosen.limit,
                concurrency=chosen.concurrency,
                context=context,
                flags=flags,
            )
            await run_harness(harness, request, chosen.python, results / f"{name}.log")
            found[name] = tuple(harness.values(request.directory))
    return found


async def run_harness(harness: Harness, request: HarnessRequest, interpreter: str, output: Path) -> None:
    """Run a harness to its end. Raises HarnessError with the end of its output if it fails."""
    with output.open("wb") as file:
        command = [interpreter, *harness.command(request)]
        process = await start_child(command, variables=harness.variables(request), output=file.fileno())
        try:
            status = await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await end_child(process)
    if status:
        raise HarnessError(f"{harness.module} ended with status {status}: {last_line(output)}")


@asynccontextmanager
async def server(flags: Sequence[str], port: int, output: Path) -> AsyncIterator[int]:
    """Run `serve` in a child process. Yields the number of tokens of the context, when the server is ready."""
    with output.open("wb") as file:
        process = await start_child(
            [sys.executable, "-m", "training_run", "serve", *flags], variables=dict(os.environ), output=file.fileno()
        )
        try:
            yield await ready(process, f"http://127.0.0.1:{port}", output)
        finally:
            with anyio.CancelScope(shield=True):
                await end_child(process)


async def ready(process: Process, address: str, output: Path) -> int:
    """Wait for the server. Raises HarnessError with its output if it ends."""
    async with httpx.AsyncClient(base_url=address, trust_env=False) as http:
        while process.returncode is None:
            try:
                if (await http.get("/health")).status_code == httpx.codes.OK:
                    return int((await http.get("/tokenizer_info")).json()["model_max_length"])
            except httpx.TransportError:
                pass
            await anyio.sleep(POLL_SECONDS)
    raise HarnessError(f"serve ended with status {process.returncode}: {last_line(output)}")


def last_line(output: Path) -> str:
    """Return the last line of an output: an error is there."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next(filter(str.strip, reversed(lines)), "no output")
    return f"{visible(last, MAX_ERROR)}; all of it: {output}, which only --output DIR keeps"


def table(found: Mapping[str, Sequence[HarnessValue]]) -> Table:
    """One row per task and metric, with every policy, and its difference to the first one."""
    shown, (first, *others) = Table(), found
    for title in ("task", "metric", *found, *(f"{name} - {first}" for name in others)):
        shown.add_column(title)
    by_row = {name: {(one.task, one.metric): one for one in values} for name, values in found.items()}
    for row in dict.fromkeys((one.task, one.metric) for values in found.values() for one in values):
        cells = [values.get(row) for values in by_row.values()]
        start = cells[0]
        changes = [f"{one.value - start.value:+.3f}" if one and start else "-" for one in cells[1:]]
        shown.add_row(*row, *map(_cell, cells), *changes)
    return shown


def _cell(one: HarnessValue | None) -> str:
    if one is None:
        return "-"
    return f"{one.value:.3f}" if one.stderr is None else f"{one.value:.3f} ± {one.stderr:.3f}"
