"""Run `learn-m3` with several seeds and write what it learned into the card.

    python -m profiles.times_table_maker.learning --out profiles/times_table --seeds 0 1 2 3 4 [-- FLAG ...]

The flags after `--` are changes to the profile. Every run evaluates all held-out problems every ten updates; `seconds`
is the duration of the whole command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from profiles.times_table_maker.card import write_card
from profiles.times_table_maker.records import RunRecord, add_run

EVALUATED = ("--eval.interval", "10", "--eval.problems-between", "0")


def measure(seed: int, flags: list[str]) -> RunRecord:
    """Run the profile once."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        own = ["--seed", str(seed), "--run-dir", str(run), "--server", "off", "--monitor.display", "none", *EVALUATED]
        began = time.perf_counter()
        subprocess.run([sys.executable, "pipeline.py", "--profile", "learn-m3", *own, *flags], check=True)
        seconds = time.perf_counter() - began
        lines = map(msgspec.json.decode, (run / "evaluations.jsonl").read_bytes().splitlines())
        accuracy = [(line["step"], line["accuracy"]) for line in lines]
    return RunRecord(changes=" ".join(flags), seed=seed, accuracy=accuracy, seconds=seconds, load=os.getloadavg()[0])


def main() -> None:
    """Measure every seed; each result is written at once."""
    parser = argparse.ArgumentParser(prog="python -m profiles.times_table_maker.learning", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("profiles/times_table"), help="directory of the card")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("flags", nargs="*", help="changes to the profile, after --")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        run = measure(seed, arguments.flags)
        add_run(arguments.out, run)
        write_card(arguments.out)
        sys.stdout.write(f"seed {seed}: {run.accuracy[0][1]:.3f} -> {run.final:.3f}, {run.updates_to_target} updates\n")


if __name__ == "__main__":
    main()
