"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures accuracy and training time of the default run for several seeds, asynchronous and synchronous.

    python -m bench learning [--seeds 0 1 2] [--arms asynchronous] [--against COMMIT]

Every run is `python pipeline.py --profile local-m3 --seed S`, one at a time. Training time runs from the first prompt
to the last update. It includes evaluations between updates, but not those before and after training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.charts import figure
from bench.fingerprint import describe_fingerprint
from bench.runs import Record
from bench.studies.runner import Arm, Study, Trial, column, run_study
from bench.tables import unique

NAME = "learning"
STYLES = {"asynchronous": ("#1f6feb", "-"), "synchronous": ("#d1740f", "--")}


def rates(record: Record) -> dict[str, float]:
    """Decode rates without and during updates, at the end of the run."""
    last = record.metrics[-1]
    named = {kind: last[f"decode_tokens_per_second/{kind}"] for kind in ("idle", "learning")}
    return {kind: rate for kind, rate in named.items() if rate}


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        Arm(name="asynchronous", flags=("--async", "true"), reference="synchronous"),
        Arm(name="synchronous", flags=("--async", "false")),
    ),
    flags=("--profile", "local-m3", "--eval.interval", "10"),
    measure=rates,
    columns=(
        column("held-out accuracy before", "before"),
        column("after", "after"),
        column("seconds of training", "seconds", "s", compare="ratio"),
        column("completion tokens", "tokens"),
        column("weight swap", "swap_median", "s"),
        column("longest", "swap_longest", "s"),
        column("tokens/s of decoding without updates", "idle"),
        column("during updates", "learning"),
    ),
    note="Medians over the seeds, with lowest and highest.",
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)


def draw(trials: Sequence[Trial], target: Path) -> None:
    """Draw held-out accuracy against seconds of training, one line per run."""
    with figure(target) as axes:
        for name in unique(one.arm for one in trials):
            colour, line = STYLES.get(name, ("#888888", ":"))
            for place, one in enumerate(one for one in trials if one.arm == name):
                points = [(point.seconds, point.accuracy) for point in one.curve]
                axes.plot(*zip(*points, strict=True), line, color=colour, lw=1.3, label=None if place else name)
        axes.axhline(0.9, color="#888888", lw=0.8, ls=":")
        axes.set(xlabel="seconds of training", ylabel="held-out accuracy, greedy", ylim=(0, 1.02), xlim=(0, None))
        seeds, machine = len({one.seed for one in trials}), describe_fingerprint(trials[0].fingerprint)
        axes.set_title(f"local-m3, {seeds} seeds, {machine}", fontsize=10)
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right")
