"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Counts the rollouts that a policy of 0.5 million parameters needs to reach a held-out accuracy, from rewards and from a
teacher of 6 million.

    python -m bench distillation [--arms NAME ...] [--seeds 0 1 2 3 4] [--list] [--quick]

`python -m profiles.embedded_maker.teacher` makes the teacher from random weights, on the demonstrations of the careful
demonstrator (seed 0), once in runs/distillation. Problems are those of `python -m bench warm_up`, whose answer is a
number: the teacher answers them, and not those that ask for a letter. The policies are the embedded one, and that of
`warm_up`, which rarely earns a reward. Batches of the first are as small as they can be, besides those of the profile.
A run ends at the first evaluation that reaches the target; evaluations are at every update or every few, except for
those that one before delays.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from bench.fingerprint import ROOT
from bench.studies import warm_up
from bench.studies.runner import Arm, Study, merged, run_study
from bench.studies.warm_up import COLUMNS, TARGET

NAME = "distillation"
MADE = "runs/distillation/teacher"
REVERSE = f"--distillation.teacher {MADE} --learner.distillation-weight 1"
FORWARD = f"{REVERSE} --distillation.loss forward_kl"
ABLE = "The embedded policy, which knows the method and rarely uses it"
UNABLE = "A policy that rarely earns a reward"
OF_UNABLE = f"--model.path {warm_up.MADE}/policy --learner.max-equal-batches 0 --eval.interval 5"
TAUGHT = f"{OF_UNABLE} --steps 150 --learner.optimizer.learning-rate 2e-3"
"""The steps and the learning rate were found with a seed that is not measured."""


def prepare(*_: object) -> tuple[str, ...]:
    """Make the teacher and the policy of `warm_up` unless they are there."""
    if not (ROOT / MADE / "model.safetensors").exists():
        command = [sys.executable, "-m", "profiles.embedded_maker.teacher", "--out", MADE, "--seed", "0"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return warm_up.prepare()


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=tuple(
        Arm(
            name=f"{name}, {groups} of {size}{', unable' if family == UNABLE else ''}",
            family=family,
            flags=merged(flags, f"--learner.batch-size {groups} --sampling.group-size {size}"),
        )
        for family, name, groups, size, flags in (
            (ABLE, "rewards", 16, 8, ""),
            (ABLE, "rewards", 1, 2, "--learner.max-equal-batches 0"),
            (ABLE, "reverse_kl", 1, 1, REVERSE),
            (ABLE, "forward_kl", 1, 1, FORWARD),
            (UNABLE, "rewards", 16, 8, f"{OF_UNABLE} --steps 120"),
            (UNABLE, "reverse_kl", 8, 1, f"{TAUGHT} {REVERSE}"),
            (UNABLE, "forward_kl", 8, 1, f"{TAUGHT} {FORWARD}"),
        )
    ),
    flags=merged(
        f"--profile local-m3 --data.train {warm_up.MADE}/train.jsonl --data.heldout {warm_up.MADE}/heldout.jsonl",
        "--steps 30 --eval.interval 1 --async false --checkpoint.interval 0 --monitor.display none",
    ),
    quick="--steps 2 --eval.problems 8",
    target=TARGET,
    prepare=prepare,
    columns=COLUMNS,
    note=(
        "Names: groups of an update, and completions of a group. Held-out greedy accuracy before training, the highest "
        "of all evaluations, and the completions until the first one "
        f"with at least {TARGET:g}, at which a run ends; profile `local-m3`. Medians over the seeds, with lowest and "
        "highest."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
