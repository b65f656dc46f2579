"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Counts the rollouts that RL needs from a policy that rarely earns a reward, alone and after demonstrations.

    python -m bench warm_up [--arms NAME ...] [--seeds 0 1 2 3 4] [--list] [--quick]

The policy is the embedded one, after 200 updates of all weights on wrong answers without work (seed 0). Problems are
those of `local-m3` whose answer is a number; demonstrations are those of the careful demonstrator in
`profiles/embedded_maker`. A run ends at the first evaluation that reaches the target. A rollout is one completion of
the policy; demonstrations are not rollouts. The files are made in runs/warm_up, once.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec

from bench.fingerprint import ROOT
from bench.runs import PipelineRun
from bench.studies.runner import Arm, Column, Study, column, merged, run_study
from profiles.embedded_maker.__main__ import problems
from profiles.embedded_maker.demonstrations import careful, guess
from profiles.maker.problem import completion, write_problems

NAME, PROFILE = "warm_up", "local-m3"
TARGET = 0.9
MADE = "runs/warm_up"
"""Directory of problems, demonstrations and policy, relative to the checkout."""

OWN = (
    f"--model.path {MADE}/policy --data.train {MADE}/train.jsonl --data.heldout {MADE}/heldout.jsonl "
    "--learner.max-equal-batches 0"
)
"""Flags of runs of the policy."""

WARM_UP = msgspec.json.encode(
    [{"kind": "sft", "steps": 60, "data": f"{MADE}/careful.jsonl"}, {"kind": "rl", "steps": 30}]
).decode()


def train_policy(out: Path, demonstrations: Path, *, steps: int) -> None:
    """Train all weights of the embedded policy on demonstrations, and write the directory of the policy."""
    flags = merged(
        f"--profile {PROFILE} --learner.objective sft --policy.method full --steps {steps} --eval off",
        ("--monitor.display", "none", "--dataset", str(demonstrations)),
    )
    with PipelineRun(flags, quiet=True) as running, TemporaryDirectory(dir=out.parent) as made:
        copy = shutil.copytree(ROOT / "profiles" / "embedded", Path(made, "policy"))
        shutil.copy(running.record().adapters / "adapters.safetensors", copy / "model.safetensors")
        copy.rename(out)


def make(out: Path) -> None:
    """Write problems, demonstrations and policy, unless they are there."""
    if (out / "policy").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    chance = Random(0)
    training, held_out = ([one for one in found if not one.wrong] for found in problems(0))
    write_problems(out / "train.jsonl", training)
    write_problems(out / "heldout.jsonl", held_out)
    write_problems(out / "careful.jsonl", training, careful)
    write_problems(out / "wrong.jsonl", training, lambda one: completion("", guess(one, chance)))
    train_policy(out / "policy", out / "wrong.jsonl", steps=200)


def prepare(*_: object) -> tuple[str, ...]:
    """Make what all arms read, which their flags name."""
    make(ROOT / MADE)
    return ()


COLUMNS = (
    column("before", "before"),
    Column(title="highest", value=lambda trial: max(point.accuracy for point in trial.curve)),
    Column(
        title=f"completions to {TARGET:g}",
        value=lambda trial: point.rollouts if (point := trial.reached(TARGET)) else None,
        missing="never",
    ),
    column("completions", "rollouts"),
    column("processor seconds", "cpu_seconds"),
)

STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        Arm(name="RL", flags=("--steps", "120")),
        Arm(name="SFT with 960 demonstrations, then RL", flags=("--stages", WARM_UP)),
    ),
    flags=merged(
        f"--profile {PROFILE} {OWN} --eval.interval 10 --async false --checkpoint.interval 0 --monitor.display none",
    ),
    quick="--eval.problems 8 --learner.batch-size 2 --sampling.group-size 2",
    target=TARGET,
    prepare=prepare,
    columns=COLUMNS,
    note=(
        f"Held-out greedy accuracy before training, the highest of all evaluations, and the completions until the "
        f"first one with at least {TARGET:g}, at which a run ends; profile `{PROFILE}`. Medians over the seeds, with "
        "lowest and highest."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
