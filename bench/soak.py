"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

A soak run: the training of `local-m3` under load, with faults at random moments.

    python -m bench soak [--minutes 30] [--seed 0]

Sixteen clients send requests, some of them invalid, and some of the clients hang up. At moments that follow from the
seed, faults are injected: hostile requests, failing rewards, SIGSTOP, a closed or full output, and SIGKILL with
`--resume`. All kills are in the first third. The last life takes the rest of the time, so that growth of memory can be
told from warmup, and is drained with SIGTERM. Then the run's files must contain every group exactly once. The exit
status is 1 if a group is lost or duplicated, a request is unanswered or answered with an unexpected status, or a life
ends in another way than intended.
"""

from __future__ import annotations

import argparse
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from bench.contenders.http_server_load import free_port
from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.runs import json_lines
from bench.soak_clients import CLIENTS, HOSTILE, Outcomes, Target, hostile, run_clients
from bench.soak_process import MEMORY_FILE, WARM_UP_SECONDS, Life, Process, small_disk_available
from bench.soak_rewards import FAULTS as REWARD_FAULTS
from bench.soak_rewards import TIMEOUT_SECONDS
from bench.tables import markdown

NAME = "soak"
RESULTS = ROOT / "bench" / "results" / "soak.jsonl"
KILLS, KILLED_FRACTION = 4, 1.0 / 3.0
"""Number of kills, and the part of the soak that they divide into lives."""

STARTS = 3
KILL, STOP, CLOSE_OUTPUT, FILL_DISK = "SIGKILL and --resume", "SIGSTOP", "closed output", "full disk under the output"
FULL_OUTPUT = "output to a full device"
PER_MINUTE = ((HOSTILE, 2.0), (tuple(REWARD_FAULTS), 2.0), ((STOP,), 0.4))
"""Kinds of faults, and how often one of them is injected."""

PROFILE = f"""
extends = "local-m3"
steps = 1_000_000

[[rewards]]
name = "format"
weight = 0.2

[[rewards]]
name = "math_eval"
correct = true

[[rewards]]
name = "choice_correctness"
correct = true

[[rewards]]
name = "bench.soak_rewards:reward"
timeout_seconds = {TIMEOUT_SECONDS}

[learner.optimizer]
learning_rate = 1e-4

[checkpoint]
interval = 5

[eval]
interval = 200
problems_between = 64
problems = 64

[[actors]]
name = "memory probe"
factory = "bench.soak_memory:MemoryProbe"
mode = "add"
options = {{ file = "%s" }}
"""


class Groups(Struct, frozen=True, kw_only=True):
    """Groups in rollouts.jsonl. prompted: according to the last checkpoint. lost: ids below it without a line."""

    prompted: int
    trained: int
    discarded: dict[str, int]
    lost: int
    duplicated: int


class SoakRun(Struct, frozen=True, kw_only=True):
    """One soak run.

    requests: per kind, number of responses by status. hung_up: requests that the client abandoned. interrupted:
    requests during a kill or a restart. unanswered, unexpected: descriptions of failures; empty in a good run.
    faults: number of injected faults by kind. steps: lines of metrics.jsonl. repeated_steps: steps with two lines.
    """

    minutes: float
    seed: int
    requests: dict[str, dict[str, int]]
    completion_tokens: int
    hung_up: int
    interrupted: int
    unanswered: list[str]
    unexpected: list[str]
    faults: dict[str, int]
    groups: Groups
    steps: int
    repeated_steps: int
    lives: list[Life]
    failures: list[str]
    command: str
    fingerprint: Fingerprint

    @property
    def passed(self) -> bool:
        """Whether nothing was lost, duplicated, unanswered or unexpected."""
        return not (
            self.groups.lost
            or self.groups.duplicated
            or self.repeated_steps
            or self.unanswered
            or self.unexpected
            or self.failures
        )


class Fault(NamedTuple):
    """A fault, and its moment in seconds since the start of the soak."""

    at: float
    kind: str


def plan(seconds: float, seed: int, *, kills: int = KILLS) -> list[Fault]:
    """The faults of a soak run in order. Each life but the last ends with a kill, and has one fault of its output."""
    draw = random.Random(seed)
    life = KILLED_FRACTION * seconds / kills
    killed = [life * (number + draw.uniform(-0.15, 0.15)) for number in range(1, kills + 1)]
    faults = [Fault(at, KILL) for at in killed]
    for kinds, per_minute in PER_MINUTE:
        count = max(1, round(per_minute * seconds / 60.0))
        shuffled = [kind for _ in range(count // len(kinds) + 1) for kind in draw.sample(kinds, len(kinds))]
        faults += [Fault(draw.uniform(0.0, seconds), kind) for kind in shuffled[:count]]
    for start, end in zip([0.0, *killed], [*killed, seconds], strict=True):
        faults.append(Fault(draw.uniform(start + 0.3 * (end - start), start + 0.6 * (end - start)), CLOSE_OUTPUT))
    return sorted(faults)


class Soak:
    """Executes the plan: keeps the process alive, injects the faults, and collects the results."""

    def __init__(self, scratch: Path, *, minutes: float, seed: int) -> None:
        self._scratch, self._seconds, self._seed = scratch, 60.0 * minutes, seed
        self._draw = random.Random(seed)
        self._run_dir = scratch / "run"
        (scratch / "faults").mkdir()
        (scratch / "soak.toml").write_text(PROFILE % (scratch / MEMORY_FILE), encoding="utf-8")
        self._target, self._outcomes = Target(free_port()), Outcomes()
        self._outputs = ["pipe", "small disk" if small_disk_available() else "/dev/full", "/dev/full"]
        self._faults: Counter[str] = Counter()
        self._lives: list[Life] = []
        self._failures: list[str] = []
        self._hostile: list[threading.Thread] = []
        self._room_at: float | None = None

    def run(self) -> SoakRun:
        """Run the whole soak."""
        self._began = time.monotonic()
        clients = run_clients(self._target, self._outcomes, seed=self._seed)
        try:
            self._start()
            for fault in plan(self._seconds, self._seed):
                self._wait_until(fault.at)
                self._inject(fault.kind)
            self._wait_until(self._seconds)
        finally:
            self._target.over = True
            clients.join()
            for thread in self._hostile:
                thread.join()
            status = self._end(signal.SIGTERM)
        if status:
            self._failures.append(f"the drained run ended with status {status}")
        return self._result()

    def _start(self) -> None:
        life = len(self._lives)
        flags = ["--profile", str(self._scratch / "soak.toml"), "--run-dir", str(self._run_dir)]
        flags += ["--server.port", str(self._target.port), *(["--resume"] if life else [])]
        output = self._outputs[life % len(self._outputs)]
        for attempt in range(STARTS):
            self._process = Process(flags, self._scratch, output=output, port=self._target.port)
            try:
                self._process.wait_until_serving()
                break
            except RuntimeError as error:
                self._failures.append(f"life {life + 1}: {error}")
                self._process.kill()
                if attempt + 1 == STARTS:
                    raise
        self._target.life += 1
        self._target.up = True
        if output == "/dev/full":
            self._faults[FULL_OUTPUT] += 1
        _say(f"life {life + 1} serves after {self._process.seconds:.0f} s, output to {output}")

    def _end(self, number: signal.Signals) -> int:
        self._target.up = False
        if self._process.status is None:
            self._process.signal(number)
        status = self._process.end()
        ends = {-signal.SIGKILL: "killed", 0: "drained"}
        steps = _steps(self._run_dir)
        self._lives.append(self._process.life(end=ends.get(status, f"status {status}"), steps=steps))
        _say(f"life {len(self._lives)} ended with status {status} at step {steps}")
        return status

    def _wait_until(self, at: float) -> None:
        while (left := at - (time.monotonic() - self._began)) > 0:
            if self._process.status is not None:
                self._failures.append(f"life {len(self._lives) + 1} ended with status {self._process.status}")
                self._end(signal.SIGTERM)
                self._start()
            self._process.read_output()
            self._process.sample()
            if self._room_at is not None and time.monotonic() >= self._room_at:
                self._make_room()
            time.sleep(min(1.0, left))

    def _inject(self, kind: str) -> None:
        _say(f"fault: {kind}")
        if kind == KILL:
            self._make_room()
            self._end(signal.SIGKILL)
            self._start()
        elif kind == STOP:
            self._process.signal(signal.SIGSTOP)
            time.sleep(self._draw.uniform(3.0, 15.0))
            self._process.signal(signal.SIGCONT)
        elif kind == CLOSE_OUTPUT:
            if self._process.fill_disk(full=True):
                kind, self._room_at = FILL_DISK, time.monotonic() + 20.0
            elif not self._process.close_output():
                return
        elif kind in REWARD_FAULTS:
            (self._scratch / "faults" / kind).touch()
        else:
            thread = threading.Thread(target=hostile, args=(kind, self._target, self._outcomes))
            self._hostile.append(thread)
            thread.start()
        self._faults[kind] += 1

    def _make_room(self) -> None:
        self._room_at = None
        self._process.fill_disk(full=False)

    def _result(self) -> SoakRun:
        for left in (self._scratch / "faults").iterdir():
            self._faults[left.name] -= 1
        steps = [line["step"] for line in json_lines(self._run_dir / "metrics.jsonl")]
        return SoakRun(
            minutes=self._seconds / 60.0,
            seed=self._seed,
            requests={kind: dict(counts) for kind, counts in sorted(self._outcomes.statuses.items())},
            completion_tokens=self._outcomes.tokens,
            hung_up=self._outcomes.hung_up,
            interrupted=self._outcomes.interrupted,
            unanswered=self._outcomes.unanswered,
            unexpected=self._outcomes.unexpected,
            faults=dict(sorted(self._faults.items())),
            groups=groups_of(self._run_dir),
            steps=len(set(steps)),
            repeated_steps=len(steps) - len(set(steps)),
            lives=self._lives,
            failures=self._failures,
            command=f"python -m bench {NAME} --minutes {self._seconds / 60.0:g} --seed {self._seed}",
            fingerprint=fingerprint(),
        )


def groups_of(run_dir: Path) -> Groups:
    """Compare rollouts.jsonl with the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"), key=lambda path: path.name)
    prompted = msgspec.json.decode((newest / "state.json").read_bytes())["prompted"]
    lines = json_lines(run_dir / "rollouts.jsonl")
    ids = Counter(line["group_id"] for line in lines)
    return Groups(
        prompted=prompted,
        trained=sum(line["outcome"] == "trained" for line in lines),
        discarded=dict(Counter(line["reason"] for line in lines if line["outcome"] == "discarded")),
        lost=sum(number not in ids for number in range(prompted)),
        duplicated=sum(count - 1 for count in ids.values()),
    )


def _steps(run_dir: Path) -> int:
    return len(json_lines(run_dir / "metrics.jsonl"))


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def read(path: Path = RESULTS) -> list[SoakRun]:
    """Read all results; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=SoakRun) for line in path.read_bytes().splitlines()]


def table(results: Sequence[SoakRun]) -> str:
    """Format the newest result as Markdown: totals, faults, and growth per life."""
    one = results[-1]
    statuses = sum((Counter(counts) for counts in one.requests.values()), Counter[str]())
    refused = ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()) if status != "200")
    groups = one.groups
    discarded = ", ".join(f"{count:,} {reason}" for reason, count in sorted(groups.discarded.items()))
    rows = [
        ("duration", f"{one.minutes:g} minutes, {len(one.lives)} lives, {CLIENTS} clients"),
        ("requests served", f"{statuses['200']:,}, with {one.completion_tokens:,} completion tokens counted"),
        ("requests refused, by status", refused),
        ("clients that hung up", f"{one.hung_up:,}"),
        ("requests during a kill or restart", f"{one.interrupted:,}"),
        ("requests unanswered; answered unexpectedly", f"{len(one.unanswered)}; {len(one.unexpected)}"),
        ("steps", f"{one.steps:,}"),
        ("groups prompted = trained + discarded", f"{groups.prompted:,} = {groups.trained:,} + {discarded or '0'}"),
        ("groups lost; duplicated", f"{groups.lost}; {groups.duplicated}"),
        ("faults injected", f"{sum(one.faults.values()):,}"),
        *((f"- {kind}", f"{count:,}") for kind, count in one.faults.items()),
    ]
    lives = [
        [str(number), life.end, life.output, f"{life.seconds:.0f}", f"{life.steps:,}", f"{life.peak_resident:,.0f}"]
        for number, life in enumerate(one.lives, start=1)
    ]
    grown = [
        [
            name,
            " ".join(f"{value:.0f}" for value in found.by_minute),
            f"{found.per_hour:+.1f}",
            f"{found.low:+.1f} to {found.high:+.1f}",
        ]
        for last in one.lives[-1:]
        for name, found in (
            ("resident MB", last.resident),
            ("resident MB with child processes", last.with_children),
            ("in use outside of MLX, MB", last.in_use),
            ("arrays of MLX, MB", last.arrays),
            ("descriptors", last.descriptors),
        )
        if found is not None
    ]
    note = (
        f"Warmup: the first {WARM_UP_SECONDS:g} s of a life. By minute: medians. Growth: median slope of all pairs of "
        f"minutes (Theil-Sen). {describe_fingerprint(one.fingerprint)}. `{one.command}`"
    )
    of_lives = ["life", "end", "output", "seconds", "steps so far", "peak resident MB"]
    of_growth = ["last life", "by minute after warmup", "growth per hour", "95 % interval"]
    tables = (markdown(["", ""], rows, text_columns=2), markdown(of_lives, lives, text_columns=3))
    return "\n\n".join([*tables, markdown(of_growth, grown, text_columns=2), note])


def main(argv: Sequence[str]) -> int:
    """Run the soak and replace the result. Returns 1 if it failed."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30.0, help="Duration of the run under load.")
    parser.add_argument("--seed", type=int, default=0, help="Determines the faults, their moments and the requests.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Results file to replace.")
    parser.add_argument("--keep", type=Path, help="Keep the run directory and the output in this new directory.")
    chosen = parser.parse_args(argv)
    if platform.system() != "Linux":
        parser.error("reads the processes of the run from /proc and needs Linux")
    with tempfile.TemporaryDirectory(prefix="clotho-soak-", ignore_cleanup_errors=True) as directory:
        scratch = chosen.keep or Path(directory)
        scratch.mkdir(parents=True, exist_ok=True)
        result = Soak(scratch, minutes=chosen.minutes, seed=chosen.seed).run()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_bytes(msgspec.json.encode(result) + b"\n")
    sys.stdout.write(table([result]) + "\n")
    for failure in islice((*result.failures, *result.unanswered, *result.unexpected), 20):
        _say(failure)
    return 0 if result.passed else 1
