"""How long from the command to the first answer.

    python -m bench startup [--repeats 3] [--out bench/results/startup.jsonl]

Wall time and processor time of whole commands, each a process of its own, from its start to its end; the files are in
the page cache. `help` is the list of all options, `imported` what has to be imported before anything can be trained,
and `dry run` the resolved profile with its estimate of memory; a peer stands where it has the like. `sampled` and
`updated` are runs of the default profile that end after one update: from the start of the process until the learner has
all rollouts of it, and until it has been made. Peers have other work to do before either, so none is beside them; whole
runs are compared by `python -m bench wall_clock`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, by_turns
from bench.fingerprint import ROOT, fingerprint
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "startup"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_startup"),
    Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_startup", foreign=True),
    Contender(name="TRL", module="bench.contenders.trl_startup", foreign=True),
)
METRICS = (
    Metric(name="seconds", unit="seconds", better="lower"),
    Metric(name="cpu_seconds", unit="seconds", better="lower"),
)
CASES = ("help", "dry run", "imported")
SAID = (
    "`sampled`, `updated`: a run of local-m3 of one update of 16 groups, without evaluation; when its learner had all "
    "rollouts, and when it had written the line of the update."
)


def measure(repeats: int, contenders: Sequence[Contender] = CONTENDERS) -> list[Measurement]:
    """Commands that end by themselves."""
    cases = [{"until": until} for until in CASES]
    return by_turns(NAME, contenders, cases, METRICS, repeats=repeats, command=COMMAND)


def measure_runs(repeats: int) -> list[Measurement]:
    """The first rollouts and the first update of runs."""
    return list(of_runs([first_update() for _ in range(repeats)]))


class Firsts(NamedTuple):
    """Seconds since the process was started: all rollouts of an update were there, and the update was made."""

    sampled: float
    updated: float


def first_update() -> Firsts:
    """Run the default profile for one update. Raises subprocess.CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        options = ["--steps", "1", "--eval.enabled", "false", "--server.port", "0", "--run-dir", str(run)]
        began = time.time()
        command = [sys.executable, "pipeline.py", "--profile", "local-m3", *options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        return firsts(run / "metrics.jsonl", began)


def firsts(metrics: Path, began: float) -> Firsts:
    """What the metrics of a run of one update say, which are written once, when it has been made."""
    (line,) = metrics.read_bytes().splitlines()
    updated = metrics.stat().st_mtime - began
    return Firsts(updated - msgspec.json.decode(line)["train_seconds"], updated)


def of_runs(found: Sequence[Firsts]) -> Iterator[Measurement]:
    """One value per run."""
    here = fingerprint()
    for until in Firsts._fields:
        yield Measurement(
            question=NAME,
            case={"until": until},
            contender=CONTENDERS[0].name,
            metric="seconds",
            unit="seconds",
            better="lower",
            values=[getattr(one, until) for one in found],
            semantics=SAID,
            versions={"mlx": here.machine.mlx_version},
            command=COMMAND,
            fingerprint=here,
        )


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """The results in Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Wall time to each point, whoever has it."""
    draw_bars(results, "seconds", target, key="until", title="from the command to the first answer")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Commands and runs; quick: our commands alone, once each."""
    return measure(1, CONTENDERS[:1]) if quick else [*measure(repeats), *measure_runs(repeats)]


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="our commands alone, once each, and no runs",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(answer, QUESTION)
