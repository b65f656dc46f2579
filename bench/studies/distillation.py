"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Counts the rollouts that the embedded policy needs to reach a held-out accuracy, from rewards and from a teacher.

    python -m bench distillation [--arms NAME ...] [--seeds 0 1 2 3 4] [--list] [--quick]

The teacher has the shape of the policy: it is the embedded policy after 60 updates of all weights on the demonstrations
of the careful demonstrator in `profiles/embedded_maker` (seed 0), made once in runs/distillation. A run ends at the
first evaluation that reaches the target; evaluations are at every update, except for those that one before delays.
"""

from __future__ import annotations

from functools import partial

from bench.fingerprint import ROOT
from bench.studies.runner import Arm, Study, merged, run_study
from bench.studies.warm_up import COLUMNS, TARGET, train_policy, write_demonstrations
from profiles.embedded_maker.__main__ import problems
from profiles.embedded_maker.demonstrations import careful

NAME = "distillation"
MADE = "runs/distillation"
DISTILLED = f"--distillation.teacher {MADE}/policy --learner.distillation-weight 1"
"""Of the runs with the teacher."""


def prepare(*_: object) -> tuple[str, ...]:
    """Make the teacher unless it is there."""
    out = ROOT / MADE
    if not (out / "policy").exists():
        out.mkdir(parents=True, exist_ok=True)
        write_demonstrations(out / "careful.jsonl", problems(0)[0], careful)
        train_policy(out / "policy", out / "careful.jsonl", steps=60)
    return ()


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=tuple(
        Arm(name=f"{name}, {groups} groups of {size}", flags=merged(flags, f"--learner.batch-size {groups}"))
        for name, groups, size, flags in (
            ("rewards", 16, 8, "--sampling.group-size 8"),
            ("rewards", 8, 4, "--sampling.group-size 4"),
            ("reverse_kl", 8, 2, f"{DISTILLED} --sampling.group-size 2"),
            ("forward_kl", 8, 2, f"{DISTILLED} --sampling.group-size 2 --distillation.loss forward_kl"),
        )
    ),
    flags=merged(
        "--profile local-m3 --steps 30 --eval.interval 1 --async false --checkpoint.interval 0 --monitor.display none"
    ),
    quick="--steps 2 --eval.problems 8",
    target=TARGET,
    prepare=prepare,
    columns=COLUMNS,
    note=(
        "Held-out greedy accuracy before training, the highest of all evaluations, and the completions until the first "
        f"one with at least {TARGET:g}, at which a run ends; profile `local-m3`. Medians over the seeds, with lowest "
        "and highest."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
