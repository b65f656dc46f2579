"""How fast does decoding go on while the learner works.

    python -m bench overlap [--repeats 3] [--out bench/results/overlap.jsonl]

Decoding and learning take turns in one thread, which gives decoding `decode_share` of its time while both have work.
`kept` is tokens per second beside the learner over tokens per second alone; the aim is at least half. In a process of
its own, 128 rows are always decoding (completions of 96 tokens, 8 to a prompt), three seconds without and at least
three with updates of 128 completions of 96 tokens that never cease: the worst case. In runs of the default profile, one
per seed, `decode_rate_idle` and `decode_rate_learning` are read off the last line of their metrics: there the learner
often waits, and fewer rows are running. 0.7 is what the profile says, 0.5 the default of the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, by_turns
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, results_path
from bench.runs import Record, run_pipeline, updates
from bench.tables import report

NAME = "overlap"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
OURS = Contender(name="clotho", module="bench.contenders.clotho_overlap")
METRICS = (
    Metric(name="idle", unit="tokens/s", better="higher"),
    Metric(name="learning", unit="tokens/s", better="higher"),
    Metric(name="kept", unit="share", better="higher"),
)
MODELS, SHARES, ROWS = ("embedded", "6m"), (0.7, 0.5), 128
SEEDS, STEPS = 3, 24
SAID = "As a run measures it itself, over its seconds of decoding with and without an update in progress."
Rates = dict[str, float]
Case = dict[str, str | int | float]


def measure(models: Sequence[str], shares: Sequence[float], repeats: int) -> list[Measurement]:
    """In a process of its own."""
    cases: list[Case] = [{"model": model, "decode_share": share, "rows": ROWS} for model in models for share in shares]
    return by_turns(NAME, [OURS], cases, METRICS, repeats=repeats, command=COMMAND)


def measure_runs(share: float, seeds: int) -> list[Measurement]:
    """In runs of the default profile, one per seed."""
    arguments = ["--profile", "local-m3", "--eval.enabled", "false", "--steps", str(STEPS)]
    arguments += ["--engine.decode-share", str(share)]
    return list(of_runs(share, [rates(run_pipeline([*arguments, "--seed", str(seed)])) for seed in range(seeds)]))


def rates(run: Record) -> Rates:
    """What a run says of its decoding at its end. Raises ValueError if it never decoded alone, or beside an update."""
    last = updates(run.metrics)[-1]
    idle, learning = last["decode_rate_idle"], last["decode_rate_learning"]
    if not idle or not learning:
        raise ValueError(f"the run has no rate to compare: {idle} tokens/s alone, {learning} beside the learner")
    return {"idle": idle, "learning": learning, "kept": learning / idle}


def of_runs(share: float, found: Sequence[Rates]) -> Iterator[Measurement]:
    """One value per run."""
    here = fingerprint()
    for metric in METRICS:
        yield Measurement(
            question=NAME,
            case={"model": "embedded, a run of local-m3", "decode_share": share},
            contender=OURS.name,
            metric=metric.name,
            unit=metric.unit,
            better=metric.better,
            values=[one[metric.name] for one in found],
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
    """A bar per case: what is kept of the rate."""
    draw_bars(results, "kept", target, title="decoding beside the learner, as a share of decoding alone")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """In process and in runs; quick: the shipped policy and one share alone, and no runs."""
    if quick:
        return measure(MODELS[:1], SHARES[:1], repeats=1)
    return [*measure(MODELS, SHARES, repeats), *(one for share in SHARES for one in measure_runs(share, SEEDS))]


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="the shipped policy and one share alone, and no runs",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(answer, QUESTION)
