"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Counts the rollouts that the policy of `learn-m3` needs to reach a held-out accuracy, from rewards and from a teacher.

    python -m bench distillation [--arms NAME ...] [--seeds 0 1 2 3 4] [--list] [--quick]

The teacher has 6 million parameters and is made once, in runs/teacher, with seed 0 (about 550 seconds of a processor
core). Its runs end at the first evaluation that reaches the target. Those from rewards are the ones of the method
`profile` of `python -m bench methods`, to their end.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from bench.fingerprint import ROOT
from bench.studies import methods
from bench.studies.runner import Arm, Column, Study, column, merged, run_study

NAME = "distillation"
TARGET = 0.9
TEACHER = "runs/teacher"
"""Directory of the teacher, relative to the checkout."""

DISTILLED = merged(
    methods.STUDY.flags,
    f"--distillation.teacher {TEACHER} --learner.distillation-weight 1 --sampling.group-size 4",
    "--learner.optimizer.learning-rate 4e-3",
)
"""Of the runs with the teacher."""


def prepare(arm: Arm, *_: object) -> tuple[str, ...]:
    """Make the teacher unless it is there."""
    if TEACHER in arm.flags and not (ROOT / TEACHER).exists():
        command = [sys.executable, "-m", "profiles.times_table_maker.teacher", "--out", TEACHER, "--seed", "0"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return ()


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        Arm(name="rewards", flags=methods.STUDY.flags),
        Arm(
            name="forward_kl",
            flags=merged(DISTILLED, "--steps 118 --distillation.loss forward_kl --distillation.top-k 8"),
        ),
        Arm(name="reverse_kl", flags=merged(DISTILLED, "--steps 350")),
    ),
    target=TARGET,
    prepare=prepare,
    columns=(
        column("before", "before"),
        Column(title="highest", value=lambda trial: max(point.accuracy for point in trial.curve)),
        Column(
            title=f"completions to {TARGET:g}",
            value=lambda trial: point.rollouts if (point := trial.reached(TARGET)) else None,
            missing="never",
        ),
        column("completions", "rollouts"),
        column("processor seconds", "cpu_seconds"),
    ),
    note=(
        "Held-out greedy accuracy before training, the highest of all evaluations, and the completions until the "
        f"first one with at least {TARGET:g}. Medians over the seeds, with lowest and highest."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
