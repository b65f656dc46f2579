"""On Linux, Clotho's decode step is NumPy and BLAS (clotho/cpu); nothing here was measured on Metal.

Measures the held-out accuracy of objectives and corrections when every batch is some updates old.

    python -m bench staleness [--methods "grpo, lag 32" "vcpo, lag 32" ...] [--seeds 0 1 2] [--parallel 2]

Every run is `python pipeline.py --profile learn-m3 --async false --rollouts.lag LAG` with the flags of the method, so
that the age of a batch does not depend on the machine, and the result is reproducible bit for bit. `vcpo` is the method
of arXiv:2602.17616; the two rows below it leave out one of its parts. In `grpo, uncorrected`, stale rollouts count as
if the current policy had sampled them; `grpo` has its clip range around the rollout policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.fingerprint import ROOT, describe_fingerprint
from bench.measurement import Measurement
from bench.tables import markdown, spread, unique
from bench.trials import Method, Outcome, TrialBenchmark, run_trial_benchmark

NAME = "staleness"
COMMAND = f"python -m bench {NAME}"
LAGS = (0, 4, 16, 32, 64)

GRPO = ("--learner.objective", "grpo")
BATCH_START = (*GRPO, "--learner.objective.ratio-reference", "batch_start")
CORRECTION = "--learner.objective.importance-correction"
REINFORCE = ("--learner.objective", "reinforce", CORRECTION, "truncate_sequence", f"{CORRECTION}.high", "8")
ADVANTAGE = "--learner.objective.advantage"
STEP_SCALE = ("--learner.step-scale", "ess")
FLAGS: dict[str, tuple[str, ...]] = {
    "grpo, uncorrected": BATCH_START,
    "grpo": GRPO,
    **{
        f"grpo, {kind}": (*BATCH_START, CORRECTION, kind)
        for kind in ("truncate", "mask", "truncate_sequence", "reject_sequence", "reject_geometric")
    },
    "cispo": ("--learner.objective", "cispo"),
    "dppo_tv": ("--learner.objective", "dppo_tv"),
    "grpo, step_scale": (*GRPO, *STEP_SCALE),
    "grpo, max_rl": (*GRPO, ADVANTAGE, "max_rl"),
    "vcpo": (*REINFORCE, ADVANTAGE, "optimal_baseline", *STEP_SCALE),
    "vcpo without step_scale": (*REINFORCE, ADVANTAGE, "optimal_baseline"),
    "vcpo without optimal_baseline": (*REINFORCE, ADVANTAGE, "group", *STEP_SCALE),
}
METHODS = tuple(
    Method(name=f"{name}, lag {lag}", family=name, flags=(*flags, "--rollouts.lag", str(lag)))
    for lag in LAGS
    for name, flags in FLAGS.items()
)
DRAWN = ("grpo, uncorrected", "grpo", "grpo, truncate", "vcpo")
"""Families of the chart, of those that were measured."""


def table(outcomes: Sequence[Outcome]) -> str:
    """Format the accuracies as Markdown: one row per method and one column per lag."""
    lags = [lag for lag in LAGS if any(_lag(one) == lag for one in outcomes)]
    first = outcomes[0].trials[0]
    rows = []
    for family in unique(one.method.family for one in outcomes):
        found = {_lag(one): spread(one.accuracies, "") for one in outcomes if one.method.family == family}
        rows.append([f"`{family}`", *(found.get(lag, "") for lag in lags)])
    seeds = max(len(one.trials) for one in outcomes)
    note = f"Held-out accuracy ({first.before:.3f} before training): median (lowest to highest) of up to {seeds} seeds."
    text = markdown(["method", *(f"lag {lag}" for lag in lags)], rows)
    return f"{text}\n\n{note} {describe_fingerprint(first.fingerprint)}. `{COMMAND}`"


def draw(outcomes: Sequence[Outcome], target: Path) -> None:
    """Draw accuracy against the lag, one line per method."""
    from bench.charts import draw_lines

    metric, lag = "held-out accuracy", "lag of the rollouts, updates"
    drawn = [
        Measurement(
            question=NAME,
            case={lag: _lag(one)},
            contender=family,
            metric=metric,
            unit="",
            better="higher",
            values=one.accuracies,
            semantics="",
            versions={},
            command=COMMAND,
            fingerprint=one.trials[0].fingerprint,
        )
        for family in DRAWN
        for one in outcomes
        if one.method.family == family
    ]
    draw_lines(drawn, metric, lag, target)


def _lag(outcome: Outcome) -> int:
    return int(outcome.method.flags[-1])


BENCHMARK = TrialBenchmark(
    command=COMMAND,
    about=__doc__,
    results=ROOT / "bench" / "results" / f"{NAME}.jsonl",
    profile="learn-m3",
    flags="--async false",
    methods=METHODS,
    table=table,
)
read = BENCHMARK.read
main = partial(run_trial_benchmark, BENCHMARK)
