"""Run one benchmark: `python -m bench NAME [options]`. Without a name, list all benchmarks."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn

from bench.contenders.process import MissingContendersError

BENCHMARKS = {
    "quick": "Regression check in 30 seconds, Clotho only; exit status 1 if a part is ten times slower.",
    "metal": "For Mac owners, in five minutes: speed, memory, parity and determinism, as a table and a file.",
    "learning": "Accuracy and training time of the default run, synchronous and asynchronous, for several seeds.",
    "decode": "Rollout throughput by batch, group size and prompt length, beside mlx-lm and mlx-lm-lora.",
    "first_token": "Time to the first token by prompt length, beside mlx-lm.",
    "update": "Time and peak memory of one policy update, beside mlx-lm-lora and TRL.",
    "sft": "Tokens per processor second and peak memory of supervised fine-tuning, beside mlx-lm.",
    "real": "A real language model: rollouts, updates and equal work beside mlx-lm-lora, and learning.",
    "peers": "Whole runs beside mlx-lm-lora and TRL: equal work, and time to 0.7 held-out accuracy.",
    "serve": "Throughput and time to first token of the server with 1 to 64 clients, beside mlx_lm.server.",
    "visitors": "Rates of a run, and of clients of serve, beside 1 to 64 long requests; first token of short ones.",
    "swap": "How long a weight swap delays decoding.",
    "save": "How long saving a checkpoint delays decoding.",
    "turns": "Processor time per turn of an environment in Python and per rollout of verifiers; prefilled tokens.",
    "soak": "Training under load with injected faults: groups lost, requests unanswered, growth of memory.",
    "compare": "Compare two sets of results; also --compare BEFORE AFTER.",
    "reproduce": "Measure a table of the documentation again, and show it beside the stored one.",
    "figures": "Write the charts and tables of the documentation from the results.",
    "screenshot": "Capture the terminal display of the default run.",
    "dashboard_screenshots": "Take pictures of the dashboard of the default run in headless Chromium.",
}
STUDIES = {
    "methods": "Held-out accuracy by objective, correction, rank of the adapter and bad setting, for several seeds.",
    "rounding": "Share of the gradient that rounding cuts in 16 bits, by objective and correction.",
    "curriculum": "Rollouts to a held-out accuracy if half of the problems are too hard or already solved.",
    "warm_up": "Rollouts that RL needs from a policy that rarely earns a reward, alone and after demonstrations.",
    "distillation": "Rollouts to a held-out accuracy, from rewards and from a teacher.",
    "learnability": "What doctor forecasts about fifteen tasks, and what RL then learns.",
    "gym": "Learning of a real language model on datasets of Reasoning Gym.",
    "proof": "A real language model on tasks that others publish: demonstrations, then rewards.",
    "environments": "Training with Atropos environments: single-turn, multi-turn, two of different weight.",
    "agents": "Training on episodes: three tools, Wordle, and one game in Python, as a taskset and over HTTP.",
    "speculation": "Tokens per forward pass and decode rate of speculative rollouts, by epoch.",
    "adapters": "Decode rate of batches with one adapter, eight adapters and the base model.",
    "overlap": "Decode rate during updates, and without them.",
    "remote": "Latency of new weights for an inference server: over HTTP, by path and by a restart.",
    "hybrid": "Makes a hybrid policy for the default task from the embedded policy; trains nothing else.",
    "search": "Best settings of mlx-lm-lora, TRL and Clotho for peers.",
}
"""Programs of `bench.studies`."""

OPTIONAL = ("matplotlib", "playwright", "pyte")
"""Packages that only charts, screenshots and measurements in a browser need."""


def module_of(name: str) -> str:
    """The module of a benchmark or study."""
    return f"bench.studies.{name}" if name in STUDIES else f"bench.{name}"


def main() -> int:
    """Run the named benchmark. Returns 2 for an unknown name or a missing package."""
    argument = sys.argv[1] if len(sys.argv) > 1 else "--help"
    chosen = "compare" if argument == "--compare" else argument
    if chosen not in (*BENCHMARKS, *STUDIES):
        for name, description in (*BENCHMARKS.items(), *STUDIES.items()):
            sys.stdout.write(f"{name:22}{description}\n")
        return 0 if argument in ("-h", "--help") else 2
    try:
        status: int = import_module(module_of(chosen)).main(sys.argv[2:])
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise
        sys.stderr.write(f"bench: {missing.name} is not installed: pip install -e '.[bench]'\n")
        return 2
    except MissingContendersError as missing_contenders:
        sys.stderr.write(f"bench: {missing_contenders}\n")
        return 2
    return status


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)  # so that the processes of the benchmark end too
    sys.exit(main())
