"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures accuracy and training time of the default run for several seeds, synchronous and asynchronous.

    python -m bench learning [--seeds 0 1 2 3 4] [--modes async sync] [--interval 10]

Every run is `python pipeline.py --profile local-m3 --seed S`. Training time runs from the first prompt to the last
update. It includes evaluations between updates, but not those before and after training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, fingerprint
from bench.runs import Record, accuracies, run_pipeline, training_began

RESULTS = ROOT / "bench" / "results" / "learning.jsonl"


class LearningRun(Struct, frozen=True, kw_only=True):
    """One run. curve: (step, seconds of training, held-out accuracy). seconds: of training. Rates are in tokens/s."""

    mode: str
    seed: int
    steps: int
    before: float
    after: float
    seconds: float
    curve: list[tuple[int, float, float]]
    swap_median: float
    swap_longest: float
    decode_rate_idle: float | None
    decode_rate_learning: float | None
    tokens: int
    command: str
    fingerprint: Fingerprint


def measure(mode: str, seed: int, interval: int) -> LearningRun:
    """Run the default profile once."""
    arguments = ["--profile", "local-m3", "--seed", str(seed), "--eval.interval", str(interval)]
    arguments += ["--async", "true" if mode == "async" else "false"]
    return summarise(mode, seed, run_pipeline(arguments), "python pipeline.py " + " ".join(arguments))


def summarise(mode: str, seed: int, record: Record, command: str) -> LearningRun:
    """Read the result from a run's metrics."""
    steps, measured = record.metrics, accuracies(record)
    began = training_began(steps)
    swaps = [line["time/weight_swap"] for line in steps if line["time/weight_swap"] is not None]
    return LearningRun(
        mode=mode,
        seed=seed,
        steps=steps[-1]["step"],
        before=measured[0][2],
        after=measured[-1][2],
        seconds=steps[-1]["time/run"] - began,
        curve=[(step, max(0.0, seconds - began), accuracy) for step, seconds, accuracy in measured],
        swap_median=statistics.median(swaps),
        swap_longest=max(swaps),
        decode_rate_idle=steps[-1]["decode_tokens_per_second/idle"],
        decode_rate_learning=steps[-1]["decode_tokens_per_second/learning"],
        tokens=sum(line["completion_length/total"] for line in steps),
        command=command,
        fingerprint=fingerprint(),
    )


def main(argv: Sequence[str]) -> int:
    """Run every mode with every seed and replace bench/results/learning.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m bench learning", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--modes", nargs="+", choices=["async", "sync"], default=["async", "sync"])
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    learned = [measure(mode, seed, chosen.interval) for seed in chosen.seeds for mode in chosen.modes]
    chosen.out.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in learned))
    for run in learned:
        sys.stdout.write(f"{describe(run)}\n")
    return 0


def describe(run: LearningRun) -> str:
    """One line about a run."""
    return (
        f"{run.mode:5} seed {run.seed}: {run.before:.3f} -> {run.after:.3f} in {run.seconds:.1f} s "
        f"({run.steps} updates, {run.tokens} tokens), swap {run.swap_median * 1e3:.3f} ms median, "
        f"{run.swap_longest * 1e3:.3f} ms longest, decode {run.decode_rate_idle or 0:.0f} tokens/s alone, "
        f"{run.decode_rate_learning or 0:.0f} while learning"
    )
