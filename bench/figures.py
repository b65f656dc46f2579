"""Draw the figures of the documentation from the results.

python -m bench figures
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib import pyplot as plt

from bench.fingerprint import ROOT
from bench.learning import RESULTS, Learnt

IMAGES = ROOT / "docs" / "images"
STYLES = {"async": ("#1f6feb", "-", "asynchronous"), "sync": ("#d1740f", "--", "synchronous (--async false)")}


def read_learnt(path: Path) -> list[Learnt]:
    """The runs of a results file."""
    return [msgspec.json.decode(line, type=Learnt) for line in path.read_bytes().splitlines()]


def draw_learning(runs: Sequence[Learnt], target: Path) -> None:
    """Held-out accuracy against seconds of training, a line per run."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    named: set[str] = set()
    for run in runs:
        colour, line, name = STYLES[run.mode]
        points = [(seconds, accuracy) for _, seconds, accuracy in run.curve]
        axes.plot(*zip(*points, strict=True), line, color=colour, lw=1.3, label=None if name in named else name)
        named.add(name)
    axes.axhline(0.9, color="#888888", lw=0.8, ls=":")
    axes.set(xlabel="seconds of training", ylabel="held-out accuracy, greedy", ylim=(0, 1.02), xlim=(0, None))
    axes.set_title(f"local-m3, {len({run.seed for run in runs})} seeds, {_machine(runs[0])}", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def _machine(run: Learnt) -> str:
    machine = run.fingerprint.machine
    return f"{machine.processor}, {machine.cores} cores, MLX {machine.mlx_version} on {machine.backend}"


def main(argv: Sequence[str]) -> int:
    """Draw everything again."""
    argparse.ArgumentParser(prog="python -m bench figures", description=__doc__).parse_args(argv)
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "clotho"
    draw_learning(read_learnt(RESULTS), IMAGES / "learning.svg")
    return 0
