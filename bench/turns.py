"""Measures what Clotho itself needs for episodes of several turns: processor time, and tokens of prefill.

    python -m bench turns [--repeats 5] [--out bench/results/turns.jsonl]

The messages of the policy are prepared, so that no model computes: 512 episodes at once, of the calculator in Python
and of the guessing game of verifiers, whose environments need little. The targets are at most 2 ms per turn in Python,
and 0.1 s per rollout of verifiers. In a third part, the embedded policy samples an episode of four turns: each token is
prefilled once. The variable CLOTHO_VERIFIERS_PYTHON names an interpreter that has verifiers (docs/verifiers.md); it is
.verifiers/bin/python without the variable.
"""

from __future__ import annotations

from bench.benchmark import Benchmark
from bench.contenders.process import Contender, measure_interleaved, verifiers_python
from bench.measurement import Case, Measurement, Metric

NAME = "turns"
OURS = Contender(name="clotho", module="bench.contenders.clotho_turns")
METRICS = (
    Metric(name="turn_processor_seconds", unit="seconds", better="lower"),
    Metric(name="rollout_processor_seconds", unit="seconds", better="lower"),
    Metric(name="prefilled_share", unit="tokens per token of the episode", better="lower"),
)


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure all parts; quick: few episodes. Raises MissingContendersError without verifiers."""
    verifiers_python()
    episodes = 16 if quick else 512
    cases: list[Case] = [
        {"environment": "Python", "episodes": episodes, "workers": 2},
        {"environment": "verifiers", "episodes": episodes},
        {"environment": "engine", "episodes": 1},
    ]
    return measure_interleaved(NAME, [OURS], cases, METRICS, repeats=2 if quick else repeats)


BENCHMARK = Benchmark(name=NAME, about=__doc__, repeats=5, quick="play few episodes", measure=measure_all)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
