"""Throughput of runs whose rollouts are sampled by workers of a Ray cluster: measured, and predicted by a simulation.

    python -m bench cluster [--quick] [--out bench/results/cluster.jsonl]
    python -m bench cluster --simulate [--from RUN_DIR] [--workers 1 8 64] [--bandwidth 1Gbit/s] ...

Without `--simulate`, short synchronous runs of local-m3 measure the costs: without a cluster, with one worker, and two
runs side by side. Then asynchronous runs with 1, 2 and 3 workers on this machine are measured, and the simulation
predicts their throughput from these costs. The learning rate is 1e-9, so that the length of completions does not change
while a run is measured. Every run is recorded when it ends, and not repeated by a later call with the same sources.

With `--simulate`, only the simulation runs. Its costs are those of the directory of a synchronous run, or of a short
run on this machine; a flag replaces a cost or a setting. Quantities may have units: 4GB, 1Gbit/s, 20ms.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.cluster_costs import Costs, Plan, Workload
from bench.cluster_runs import RunFiles, RunFilesError, costs_of, read_run, workload_of
from bench.cluster_simulation import simulate
from bench.cluster_tally import Forecast
from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint, training_sources
from bench.measurement import results_path
from bench.tables import markdown, number

NAME = "cluster"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)

QUIET = ("--monitor.display", "none", "--server.port", "0")
ALWAYS = ("--profile", "local-m3", "--eval", "off", "--checkpoint.interval", "0", *QUIET)
STATIONARY = ("--learner.optimizer.learning-rate", "1e-9", "--learner.schedule", "constant")
SYNCHRONOUS = ("--async", "false")
SMALL = ("--learner.batch-size", "2")
LOADS: Mapping[str, tuple[str, ...]] = {"256 rows": (), "16 rows": ("--engine.max-num-seqs", "16")}
"""Limits of the rows of an engine: with few rows, workers are the bottleneck."""

WORKERS = (1, 2, 3)
WARM_UP = 10
SIMULATED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
AHEAD = (1, 2, 3, 4, 6, 8, 12, 16)
WORTH = 0.02
"""A further batch in flight must raise the throughput by this share: batches in flight make rollouts older."""


class MeasuredRun(Struct, frozen=True, kw_only=True, tag="run"):
    """A run. files: of a run that measures costs. groups_per_second: after the warm-up, of a run that is predicted.

    efficiency: rate of two runs side by side, relative to one alone.
    """

    name: str
    flags: tuple[str, ...]
    sources: str
    command: str
    fingerprint: Fingerprint
    files: RunFiles | None = None
    groups_per_second: float = 0.0
    efficiency: float = 0.0
    workers: int = 0
    load: str = ""


class Simulated(Struct, frozen=True, kw_only=True, tag="simulated"):
    """A simulated run. scenario: the table that it belongs to."""

    scenario: str
    costs: Costs
    plan: Plan
    forecast: Forecast
    command: str
    fingerprint: Fingerprint


Result = MeasuredRun | Simulated


def read(path: Path = RESULTS) -> Sequence[Result]:
    """Read all results; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


# -- real runs ----------------------------------------------------------------------------------------------------


@contextmanager
def running(*commands: Sequence[str]) -> Iterator[list[Path]]:
    """Run `python pipeline.py` with each list of flags, at the same time; yield the run directories.

    Raises subprocess.CalledProcessError if an exit status is not 0.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directories = [Path(scratch, str(place)) for place in range(len(commands))]
        processes = [
            subprocess.Popen(
                [sys.executable, "pipeline.py", "--run-dir", str(directory), *flags],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
            )
            for directory, flags in zip(directories, commands, strict=True)
        ]
        try:
            for process in processes:
                if process.wait():
                    raise subprocess.CalledProcessError(process.returncode, process.args)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        yield directories


def ray(workers: int) -> list[str]:
    """Flags of a run that starts a cluster on this machine."""
    return ["--cluster", "ray", "--cluster.address", "local", "--cluster.workers", str(workers)]


class Recorder:
    """Runs what the results file does not contain yet, and writes every result when it is there."""

    def __init__(self, path: Path) -> None:
        self._path, self._sources, self._here = path, training_sources(), fingerprint()
        known = [one for one in read(path) if isinstance(one, MeasuredRun) and one.sources == self._sources]
        self._known = {(one.name, one.flags): one for one in known}
        self.results = list[Result]()

    def run(self, name: str, flags: Sequence[str], measure: Callable[[], dict[str, Any]]) -> MeasuredRun:
        """Return the result of a run with this name and these flags."""
        found = self._known.get((name, tuple(flags)))
        if found is None:
            sys.stderr.write(f"bench: {name}\n")
            found = MeasuredRun(
                name=name,
                flags=tuple(flags),
                sources=self._sources,
                command="python pipeline.py " + " ".join(flags),
                fingerprint=self._here,
                **measure(),
            )
        self.add(found)
        return found

    def add(self, result: Result) -> None:
        """Add a result, and write the file: results of this call first, then earlier ones that may be used again."""
        self.results.append(result)
        kept = [one for one in self._known.values() if one not in self.results]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (*self.results, *kept)))

    def simulated(self, scenario: str, costs: Costs, plan: Plan, forecast: Forecast) -> None:
        """Add the result of a simulation."""
        self.add(
            Simulated(
                scenario=scenario, costs=costs, plan=plan, forecast=forecast, command=COMMAND, fingerprint=self._here
            )
        )

    def write(self) -> None:
        """Write the results of this call only."""
        self._path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in self.results))


def measure_costs(recorder: Recorder, *, steps: int) -> tuple[Costs, Workload]:
    """Measure the costs of this machine by runs that are not predicted."""
    cases = {
        "synchronous": synchronous(steps),
        "synchronous, small batches": synchronous(2 * steps, *SMALL),
        "synchronous, one worker": synchronous(steps, *ray(1)),
        "synchronous, one worker, small batches": synchronous(2 * steps, *SMALL, *ray(1)),
    }
    found = [files_of(recorder, name, flags) for name, flags in cases.items()]
    alone = cases["synchronous"]

    def side_by_side() -> dict[str, Any]:
        with running(alone, alone) as directories:
            return {"efficiency": efficiency(found[0], [read_run(directory) for directory in directories])}

    together = recorder.run("synchronous, two side by side", alone, side_by_side)
    machine = {"cores": float(os.cpu_count() or 1), "efficiency": together.efficiency}
    return costs_of(found, machine), workload_of(found[0])


def synchronous(steps: int, *flags: str) -> list[str]:
    """Flags of a run that measures costs."""
    return [*ALWAYS, *STATIONARY, *SYNCHRONOUS, "--steps", str(steps), *flags]


def files_of(recorder: Recorder, name: str, flags: Sequence[str]) -> RunFiles:
    """Run once, and return what the run directory says."""

    def measure() -> dict[str, Any]:
        with running(flags) as [directory]:
            return {"files": read_run(directory)}

    files = recorder.run(name, flags, measure).files
    assert files is not None
    return files


def efficiency(alone: RunFiles, together: Sequence[RunFiles]) -> float:
    """Rate of two runs side by side, relative to one alone: the same batches, decoded and trained on."""
    one, *others = (
        sum(batch.decode + batch.update for batch in run.batches[1:]) / len(run.batches[1:])
        for run in (alone, *together)
    )
    return min(1.0, one * len(others) / sum(others))


def predict(recorder: Recorder, costs: Costs, workload: Workload, *, load: str, workers: int, quick: bool) -> None:
    """Measure an asynchronous run, and predict its throughput."""
    flags, (steps, warm_up) = LOADS[load], (8, 2) if quick else (60, WARM_UP)
    run = [*ALWAYS, *STATIONARY, *flags, "--steps", str(steps), *ray(workers)]

    def measure_rate() -> dict[str, Any]:
        with running(run) as [directory]:
            files = read_run(directory)
        return {"groups_per_second": files.groups_per_second(warm_up), "workers": workers, "load": load}

    recorder.run(f"asynchronous, {load}, workers {workers}", run, measure_rate)
    plan = Plan(
        workers=workers,
        max_num_seqs=int(flags[-1]) if flags else 256,
        decode_share=0.7,
        on_learner_machine=True,
        steps=steps - warm_up,
        warm_up=warm_up,
    )
    recorder.simulated(f"{VALIDATION}{load}", costs, plan, simulate(costs, workload, plan))


def measure(out: Path, *, quick: bool) -> list[Result]:
    """Measure the costs, measure and predict the runs with few workers, and simulate many workers."""
    recorder = Recorder(out)
    costs, workload = measure_costs(recorder, steps=6 if quick else 20)
    for load, flags in list(LOADS.items())[: 1 if quick else None]:
        loaded = costs
        if flags:  # a parity check has as many rows as an engine
            files = files_of(recorder, f"synchronous, one worker, {load}", synchronous(12, *flags, *ray(1)))
            loaded = replace(costs, version_seconds=files.version_seconds)
        for workers in WORKERS[: 1 if quick else None]:
            predict(recorder, loaded, workload, load=load, workers=workers, quick=quick)
    for title, changed, drawn, plan in scenarios(costs, workload):
        for workers in (1, 8) if quick else SIMULATED:
            forecast, best = best_ahead(changed, drawn, replace(plan, workers=workers))
            recorder.simulated(title, changed, best, forecast)
    recorder.write()
    return recorder.results


# -- simulation ---------------------------------------------------------------------------------------------------

VALIDATION, TITLE = "prediction, ", "simulation"
LARGE = Costs(
    step_seconds=0.03,
    row_seconds=1e-4,
    group_seconds=0.1,
    update_seconds=1.0,
    update_token_seconds=2e-5,
    version_seconds=0.2,
    score_seconds=0.01,
    load_seconds=0.5,
    head_group_seconds=2e-3,
    head_call_seconds=2e-4,
    latency_seconds=1e-3,
    weight_bytes=4e7,
    token_bytes=100.0,
    bandwidth=1.25e9,
)
"""Assumed, not measured: completions of 1,000 tokens, a worker with 4,600 tokens/s at 256 rows, and a learner with
50,000 tokens/s, at 10 Gbit/s."""


def scenarios(costs: Costs, workload: Workload) -> Iterator[tuple[str, Costs, Workload, Plan]]:
    """Title, costs, groups and settings of the tables of docs/cluster.md."""
    alone = replace(costs, cores=0.0, efficiency=1.0, bandwidth=1.25e8, head_call_seconds=LARGE.head_call_seconds)
    yield "local-m3, measured costs, a machine per worker, 1 Gbit/s", alone, workload, Plan(steps=32, warm_up=8)
    drawn = workload.changed(mean_tokens=1000.0)
    plan = Plan(batch_size=256, steps=10, warm_up=4)
    for name, size in (("adapter of 40 MB", 4e7), ("patch of 150 MB", 1.5e8), ("full weights of 15 GB", 1.5e10)):
        yield f"assumed costs, {name}, 10 Gbit/s", replace(LARGE, weight_bytes=size), drawn, plan


def best_ahead(costs: Costs, workload: Workload, plan: Plan) -> tuple[Forecast, Plan]:
    """Return the forecast with the fewest batches ahead beyond which the throughput does not rise any more."""
    best: tuple[Forecast, Plan] | None = None
    for ahead in AHEAD:
        tried = replace(plan, max_batches_ahead=ahead)
        forecast = simulate(costs, workload, tried)
        if best is not None and forecast.groups_per_second < (1.0 + WORTH) * best[0].groups_per_second:
            break
        best = forecast, tried
    assert best is not None
    return best


def simulation_table(results: Sequence[Simulated]) -> str:
    """One row per number of workers."""
    heading = [
        *("workers", "batches ahead", "groups/s", "updates/h", "worker decodes", "waits for weights", "idle"),
        *("learner busy", "link busy", "staleness, mean (p95)", "discarded as stale", "bottleneck"),
    ]
    rows = []
    for one in results:
        found = one.forecast
        shares = (found.decoding, found.waiting_for_weights, found.idle, found.learner_busy, found.network_busy)
        decoding, weights, idle, learner, network = (f"{share:.0%}" for share in shares)
        age = f"{found.staleness_mean:.1f} ({found.staleness_p95:.0f})"
        rates = [f"{found.groups_per_second:,.3g}", number(3600 * found.updates_per_second)]
        rows.append([f"{found.workers:,}", str(found.max_batches_ahead), *rates, decoding, weights, idle])
        rows[-1] += [learner, network, age, f"{found.stale:.1%}", found.bottleneck]
    return markdown(heading, rows)


def assumptions(one: Simulated) -> str:
    """Say in one sentence what a simulation begins with."""
    costs, plan = one.costs, one.plan
    decoding = plan.max_num_seqs / (costs.step_seconds + plan.max_num_seqs * costs.row_seconds)
    training = f"{number(1.0 / costs.update_token_seconds)} tokens/s" if costs.update_token_seconds else "any rate"
    link = "any rate" if costs.bandwidth is None else f"{number(8e-9 * costs.bandwidth)} Gbit/s"
    return (
        f"A worker decodes {number(decoding)} tokens/s with {plan.max_num_seqs} rows. The learner trains on {training} "
        f"plus {number(1e3 * costs.update_seconds)} ms per update. A batch has {plan.batch_size} groups, and a version "
        f"{number(1e-6 * costs.weight_bytes)} MB; the link has {link}."
    )


def table(results: Sequence[Result]) -> str:
    """Measured and predicted throughput, then a table per scenario."""
    measured = [one for one in results if isinstance(one, MeasuredRun) and one.groups_per_second]
    made = [one for one in results if isinstance(one, Simulated)]
    rows = []
    for run in measured:
        for one in made:
            if (one.scenario, one.plan.workers) == (f"{VALIDATION}{run.load}", run.workers):
                predicted = one.forecast.groups_per_second
                difference = f"{predicted / run.groups_per_second - 1.0:+.0%}"
                cells = [f"{run.groups_per_second:.1f}", f"{predicted:.1f}", difference, one.forecast.bottleneck]
                rows.append([run.load, str(run.workers), *cells])
    heading = ["engine", "workers", "measured, groups/s", "predicted", "difference", "bottleneck"]
    parts = [markdown(heading, rows)] if rows else []
    scenarios = dict.fromkeys(one.scenario for one in made if not one.scenario.startswith(VALIDATION))
    for title in scenarios:
        rows_of = [one for one in made if one.scenario == title]
        parts += [f"**{title}**", simulation_table(rows_of), assumptions(rows_of[0])]
    return "\n\n".join([*parts, f"{describe_fingerprint(results[0].fingerprint)}. `{COMMAND}`"])


# -- command line -------------------------------------------------------------------------------------------------

PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
UNITS = {
    **{f"{prefix}{unit}": factor for prefix, factor in PREFIXES.items() for unit in ("B", "B/S")},
    **{f"{prefix}BIT/S": factor / 8.0 for prefix, factor in PREFIXES.items()},
    "": 1.0,
    "S": 1.0,
    "MS": 1e-3,
    "US": 1e-6,
    "%": 0.01,
}


def quantity(text: str) -> float:
    """A number with an optional unit: 4GB, 1Gbit/s, 20ms, 10%. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/%]*)", text.strip(), re.IGNORECASE)
    try:
        if found is not None:
            return float(found[1]) * UNITS[found[2].upper()]
    except (KeyError, ValueError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a quantity such as 4GB, 1Gbit/s, 20ms or 0.5")


def _described(kind: type[Struct]) -> Iterator[tuple[str, str]]:
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        for meta in get_args(annotation)[1:]:
            if isinstance(meta, Meta) and meta.description:
                yield name, meta.description


def parser() -> argparse.ArgumentParser:
    """The flags. Those of the simulation are the fields of `Costs` and `Plan`."""
    found = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--quick", action="store_true", help="A few steps of each kind of run, to check the benchmark.")
    found.add_argument("--out", type=Path, help=f"Results file; of the benchmark: {RESULTS.relative_to(ROOT)}.")
    found.add_argument("--simulate", action="store_true", help="Simulate, and measure at most the costs.")
    made = found.add_argument_group("with --simulate")
    made.add_argument("--from", dest="source", type=Path, help="Directory of the run that the costs come from.")
    made.add_argument("--workers", type=int, nargs="+", default=list(SIMULATED), help="Numbers of workers.")
    made.add_argument("--max-batches-ahead", type=int, help="As in a profile; not given: the best value is searched.")
    made.add_argument("--synchronous", action="store_true", help="As with --async false.")
    made.add_argument("--mean-tokens", type=quantity, help="Mean number of tokens of a completion.")
    made.add_argument("--group-size", type=int, help="Completions of a group.")
    made.add_argument("--zero-variance", type=quantity, help="Share of groups that are discarded for their rewards.")
    made.add_argument("--steps", type=int, help="Batches that are measured.")
    made.add_argument("--warm-up", type=int, help="Batches before; at least twice those in flight.")
    made.add_argument("--seed", type=int, help="Seed of groups and failures.")
    for kind in (Costs, Plan):
        hints = get_type_hints(kind)
        for name, text in _described(kind):
            flag = f"--{name.replace('_', '-')}"
            if flag not in found._option_string_actions:
                made.add_argument(flag, type=int if hints[name] in (int, int | None) else quantity, help=text)
    return found


def _given(chosen: argparse.Namespace, kind: type[Struct]) -> dict[str, Any]:
    names = (name for name in kind.__struct_fields__ if name != "workers")
    values = {name: getattr(chosen, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def simulated(chosen: argparse.Namespace) -> list[Result]:
    """Simulate every number of workers. Raises RunFilesError and msgspec.ValidationError."""
    costs_given, plan_given = _given(chosen, Costs), _given(chosen, Plan)
    if chosen.source is not None:
        run = read_run(chosen.source)
    else:
        sys.stderr.write("bench: a short run measures the costs; --from RUN_DIR reads them from a run\n")
        with running(synchronous(12)) as [directory]:
            run = read_run(directory)
    costs = msgspec.convert(msgspec.to_builtins(costs_of([run], costs_given)), Costs)
    workload = workload_of(run).changed(
        mean_tokens=chosen.mean_tokens, group_size=chosen.group_size, zero_variance=chosen.zero_variance
    )
    base = run.plan if run.plan.synchronous == chosen.synchronous else replace(run.plan, max_batches_ahead=0)
    here, results = fingerprint(), list[Result]()
    for workers in chosen.workers:
        settings = msgspec.to_builtins(replace(base, synchronous=chosen.synchronous, warm_up=8, steps=32))
        plan = msgspec.convert({**settings, **plan_given, "workers": workers}, Plan)
        if chosen.synchronous or chosen.max_batches_ahead is not None:
            forecast = simulate(costs, workload, plan)
        else:
            forecast, plan = best_ahead(costs, workload, plan)
        results.append(
            Simulated(scenario=TITLE, costs=costs, plan=plan, forecast=forecast, command=COMMAND, fingerprint=here)
        )
    return results


def main(argv: Sequence[str]) -> int:
    """Measure or simulate, and print the tables. Returns 2 and prints one line for bad input."""
    chosen = parser().parse_args(argv)
    if not chosen.simulate:
        sys.stdout.write(table(measure(chosen.out or RESULTS, quick=chosen.quick)) + "\n")
        return 0
    try:
        results = simulated(chosen)
    except (RunFilesError, msgspec.ValidationError) as error:
        message = re.sub(r"`\$\.(\w+)`", lambda found: f"--{found[1].replace('_', '-')}", str(error))
        sys.stderr.write(f"bench: {message}\n")
        return 2
    if chosen.out is not None:
        chosen.out.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    sys.stdout.write(table(results) + "\n")
    return 0
