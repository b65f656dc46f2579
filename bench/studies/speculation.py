"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Tokens per forward pass and decode rate of speculative rollouts, by epoch.

    python -m bench speculation [--seeds 0 1 2]

Each arm is a synchronous run of local-m3 on its first 128 problems: one epoch is 8 steps of 16 groups with 8
completions each, and the policy is trained in between. Tokens per pass are the sampled tokens divided by the forward
passes over a row that sampled them, 1 without drafts. The rate is sampled tokens per second of decoding, prefill
included. On the CPU, decoding is bound by computation: a forward pass over several tokens of a row costs more than over
one.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

from bench.fingerprint import ROOT
from bench.runs import Record
from bench.studies.runner import Arm, Study, column, run_study

NAME = "speculation"
PROBLEMS, STEPS_OF_EPOCH, EPOCHS = 128, 8, 3


def epochs(record: Record) -> dict[str, float]:
    """Tokens per pass and rate of each epoch. Discarded groups count: the engine has sampled them too."""
    lines, found = record.metrics, dict[str, float]()
    ages = [0.0, *(line["time/run"] for line in lines)]
    sampled = [line["tokens_per_second"] * (ages[i + 1] - ages[i]) for i, line in enumerate(lines)]
    for first in range(0, len(lines), STEPS_OF_EPOCH):
        epoch, end = 1 + first // STEPS_OF_EPOCH, first + STEPS_OF_EPOCH
        tokens = sum(sampled[first:end])
        passes = sum(line["speculation/passes"] for line in lines[first:end]) or tokens
        found[f"per pass {epoch}"] = tokens / passes
        found[f"rate {epoch}"] = tokens / sum(line["time/decode"] for line in lines[first:end])
    return found


def first_problems(_: Arm, __: int, scratch: Path) -> tuple[str, str]:
    """The flag with the problems, in a file."""
    with (ROOT / "profiles" / "embedded" / "train.jsonl").open(encoding="utf-8") as lines:
        (scratch / "problems.jsonl").write_text("".join(islice(lines, PROBLEMS)), encoding="utf-8")
    return "--data.train", str(scratch / "problems.jsonl")


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        Arm(name="off"),
        Arm(name="history", flags=("--engine.speculation", "history"), reference="off"),
        Arm(name="prompt", flags=("--engine.speculation", "prompt"), reference="off"),
    ),
    flags=("--profile", "local-m3", "--async", "false", "--eval", "off", "--steps", str(EPOCHS * STEPS_OF_EPOCH)),
    quick="--steps 2 --learner.batch-size 2 --sampling.group-size 2",
    seeds=(0, 1, 2),
    measure=epochs,
    prepare=first_problems,
    columns=(
        *(column(f"tokens per pass, epoch {epoch}", f"per pass {epoch}") for epoch in range(1, EPOCHS + 1)),
        *(column(f"tokens/s, epoch {epoch}", f"rate {epoch}", compare="ratio") for epoch in range(1, EPOCHS + 1)),
    ),
    note="Synchronous runs of local-m3 on 128 problems; medians over the seeds, with lowest and highest.",
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
