"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures what long requests of HTTP clients cost everybody else: a training run, or other clients of `serve`.

    python -m bench visitors [--only run] [--repeats 2] [--quick] [--out bench/results/visitors.jsonl]

A run of local-m3 trains without end. In each repeat it is measured beside 1, 8 and 64 long requests, and alone before
and after each; every long request is of another client: streams of up to 29,200 tokens beside groups of 8 completions,
or of up to 8,192 tokens beside groups of 32. `serve` has four other clients, which ask for 64 tokens again and again.
Beside all of them, one client sends at most ten short requests per second; the time to its first token is given as
median and 95th percentile of a period.

A ratio is a rate beside long requests, divided by the mean of the rates alone before and after, in the same process. So
other work on the machine, whose load average stands beside the rates, matters less than for the rates themselves, and
so does the policy, whose completions change while it learns. The model is the policy
of local-m3 with its context extended to 32,768 tokens; the text of a long request is meaningless, its cost is not. Each
event of its stream counts as a token.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bench.benchmark import Benchmark
from bench.contenders.http_clients import Body, answered_tokens, first_text, lines
from bench.contenders.http_server_load import free_port, wait_until_ready
from bench.fingerprint import ROOT, fingerprint
from bench.measurement import Case, Measurement, Metric, measured
from bench.runs import json_lines
from bench.tables import describe_conditions, markdown, spread

NAME = "visitors"

CONTEXT = 32_768
VISITORS = (1, 8, 64)
SECONDS, QUICK_SECONDS = 6.0, 4.0
SETTLE = 0.4
"""Part of a period before its measurement, in which long requests are prefilled and earlier ones end."""

FIRST_UPDATES = 20
"""Updates before the first period: completions change most at the beginning."""

PAUSE = 0.1
"""Seconds between two short requests, which would be a load of their own otherwise."""

CLIENTS, CLIENT_TOKENS = 4, 64
SEMANTICS = "Rates of a period, beside a number of long requests, and the time to the first token of short requests."
RATES = ("rollout_tokens_per_second", "updates_per_second", "client_tokens_per_second")
FIRST_TOKEN = ("first_token_median", "first_token_p95")
METRICS = (
    Metric(name=RATES[0], unit="tokens/s", better="higher"),
    Metric(name=RATES[1], unit="updates/s", better="higher"),
    Metric(name=RATES[2], unit="tokens/s", better="higher"),
    Metric(name=FIRST_TOKEN[0], unit="seconds", better="lower"),
    Metric(name=FIRST_TOKEN[1], unit="seconds", better="lower"),
    Metric(name="long_tokens_per_second", unit="tokens/s", better="higher"),
    Metric(name="load", unit="processes", better="lower"),
)


class Host(NamedTuple):
    """Who serves the visitors: a run with this group size, or `serve` with clients of its own if it is 0."""

    group_size: int
    max_tokens: int


HOSTS = {"run": Host(8, 29_200), "run of large groups": Host(32, 8192), "serve": Host(0, 29_200)}


def write_model(target: Path) -> Path:
    """Write the policy of local-m3 with a context of `CONTEXT` tokens."""
    shutil.copytree(ROOT / "profiles" / "embedded", target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


class Service:
    """A server that is running. others: clients of its own, which are measured."""

    def __init__(self, port: int, run: Path | None) -> None:
        """run: directory of the run; None without a run."""
        self.port, self._run = port, run
        self.others = 0 if run else CLIENTS

    def steps(self) -> list[tuple[float, int]]:
        """Age of the run in seconds and tokens of the groups, by update."""
        metrics = json_lines(self._run / "metrics.jsonl") if self._run else []
        return [(line["time/run"], line["completion_length/total"]) for line in metrics]


@contextmanager
def serving(host: Host) -> Iterator[Service]:
    """Start a run or `serve` in a process of its own, until the end of the block. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        model, run, port = write_model(Path(scratch, "model")), Path(scratch, "run"), free_port()
        command = [sys.executable, "-m", "training_run", *(["--profile", "local-m3"] if host.group_size else ["serve"])]
        command += ["--model", str(model), "--server.port", str(port)]
        if host.group_size:
            command += ["--sampling.group-size", str(host.group_size), "--steps", "1000000", "--eval", "off"]
            command += ["--checkpoint.interval", "0", "--monitor.display", "none", "--run-dir", str(run)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        try:
            wait_until_ready(process, port)
            service = Service(port, run if host.group_size else None)
            while host.group_size and len(service.steps()) < FIRST_UPDATES:
                if process.poll() is not None:
                    raise RuntimeError(f"the run ended with status {process.returncode}")
                time.sleep(0.1)
            yield service
        finally:
            process.kill()
            process.wait()


class Tally:
    """What clients received. first: seconds to the first tokens of short requests."""

    def __init__(self) -> None:
        self.client_tokens = self.long_tokens = 0.0
        self.first = list[float]()


def question(number: int, tokens: int) -> Body:
    """A question that is answered with so many tokens; equal numbers give equal questions."""
    asked = [{"role": "user", "content": f"What is {number % 90 + 10} + {number % 7 + 10}?"}]
    return {"messages": asked, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}


async def visit(service: Service, number: int, max_tokens: int, tally: Tally) -> None:
    """Ask for a long response, and read it to its end; then again."""
    while True:
        async for line in lines(service.port, question(number, max_tokens) | {"stream": True}, f"visitor-{number}"):
            tally.long_tokens += line.startswith(b"data: {")


async def ask_again_and_again(service: Service, number: int, tally: Tally) -> None:
    """Ask for one response after the other, as a client of `serve`."""
    while True:
        tokens = await answered_tokens(service.port, question(number, CLIENT_TOKENS), f"client-{number}")
        tally.client_tokens += tokens  # after the wait, in which other clients add theirs


async def ask_shortly(service: Service, tally: Tally) -> None:
    """Measure the first token of one short request after the other."""
    number = 0
    while True:
        number += 1
        seconds = await first_text(service.port, question(number, 4), "short")
        if not math.isnan(seconds):
            tally.first.append(seconds)
        await asyncio.sleep(PAUSE)


async def period(service: Service, visitors: int, host: Host, seconds: float) -> dict[str, float]:
    """Measure for this time beside so many long requests. Raises RuntimeError if no update or short request ended."""
    tally = Tally()
    tasks = [asyncio.create_task(visit(service, number, host.max_tokens, tally)) for number in range(visitors)]
    tasks += [asyncio.create_task(ask_again_and_again(service, number, tally)) for number in range(service.others)]
    await asyncio.sleep(SETTLE * seconds)
    tasks.append(asyncio.create_task(ask_shortly(service, tally)))
    before, began = service.steps(), time.perf_counter()
    clients, long, first = tally.client_tokens, tally.long_tokens, len(tally.first)
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        elapsed, after, found = time.perf_counter() - began, service.steps(), tally.first[first:]
        rates = {
            FIRST_TOKEN[0]: statistics.median(found) if found else math.inf,
            FIRST_TOKEN[1]: percentile_95(found) if found else math.inf,
            "long_tokens_per_second": (tally.long_tokens - long) / elapsed,
            "load": os.getloadavg()[0],
        }
        if service.others:
            rates[RATES[2]] = (tally.client_tokens - clients) / elapsed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not found or (not service.others and len(after) == len(before)):
        raise RuntimeError(f"nothing ended in {elapsed:.0f} s beside {visitors} long requests")
    return rates | ({} if service.others else rates_of(before, after))


def rates_of(before: Sequence[tuple[float, int]], after: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Rates between the last update before a period and the last one in it, so that no update is counted in part."""
    updates = after[len(before) :]
    elapsed = updates[-1][0] - before[-1][0]
    return {RATES[0]: sum(tokens for _, tokens in updates) / elapsed, RATES[1]: len(updates) / elapsed}


def percentile_95(values: Sequence[float]) -> float:
    """The value that 95 % of the values do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def measure(name: str, repeats: int, quick: bool) -> list[Measurement]:
    """Measure one service. quick: short periods, once."""
    host, seconds, repeats = HOSTS[name], QUICK_SECONDS if quick else SECONDS, 1 if quick else repeats
    found: dict[int, list[dict[str, float]]] = {visitors: [] for visitors in (0, *VISITORS)}
    with serving(host) as service:
        for _ in range(repeats):
            for visitors in (0, *chain.from_iterable((visitors, 0) for visitors in VISITORS)):
                found[visitors].append(asyncio.run(period(service, visitors, host, seconds)))
                sys.stderr.write(f"bench: {name}, {visitors} long requests: {found[visitors][-1]}\n")
    here = fingerprint()
    case: Case = {"service": name, "group_size": host.group_size, "max_tokens": host.max_tokens, "seconds": seconds}
    return [
        measured(NAME, case, str(number), metric, [one[metric.name] for one in periods], here, semantics=SEMANTICS)
        for number, periods in found.items()
        for metric in METRICS
        if metric.name in periods[0]
    ]


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure all services."""
    return [one for name in HOSTS for one in measure(name, repeats, quick)]


def table(results: Sequence[Measurement]) -> str:
    """One table per service: a row for each number of long requests, ratios to the rates alone in brackets."""
    parts = []
    for case in {str(one.case): one.case for one in results}.values():
        mine = {(one.contender, one.metric): one for one in results if one.case == case}
        shown = [metric for metric in METRICS if ("0", metric.name) in mine]
        rows = [
            [visitors, *(_cell(mine, visitors, metric) for metric in shown)]
            for visitors in dict.fromkeys(visitors for visitors, _ in mine)
        ]
        group = f", groups of {case['group_size']}" if case["group_size"] else ""
        title = f"**{case['service']}{group}, long requests of up to {case['max_tokens']:,} tokens**"
        parts += [title, markdown(["long requests", *(one.name.replace("_", " ") for one in shown)], rows)]
    return "\n\n".join([*parts, describe_conditions(results)])


def _cell(mine: dict[tuple[str, str], Measurement], visitors: str, metric: Metric) -> str:
    one, alone = mine[visitors, metric.name], mine["0", metric.name]
    if visitors == "0" or metric.name not in RATES:
        return spread(one.values, one.unit)
    first = range(VISITORS.index(int(visitors)), len(alone.values), len(VISITORS) + 1)
    pairs = [alone.values[at : at + 2] for at in first]
    ratios = [beside / statistics.fmean(pair) for beside, pair in zip(one.values, pairs, strict=True)]
    return f"{spread(one.values, one.unit)} [{spread(ratios, '')}]"


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=2,
    quick=f"periods of {QUICK_SECONDS:g} seconds, once",
    measure=measure_all,
    table=table,
    parts={name: partial(measure, name) for name in HOSTS},
)
read, main = BENCHMARK.read, BENCHMARK.main
