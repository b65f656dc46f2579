"""The best settings of mlx-lm-lora's GRPO for the task of profile local-m3, by coordinate search.

    python -m bench search [--seeds 3] [--out bench/results/search.jsonl]

From two starts, the settings of local-m3 and the library's own defaults, one setting after the other is varied and the
best value kept. Ranked by seconds of processor time of training until greedy accuracy on all held-out problems reaches
0.9, the mean over seeds: unlike seconds on the wall, they mean the same on a machine that is shared. A run that
has not reached it after 10 such seconds is given up, and its settings come behind all that have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.contenders.process import Answers, Contender, running
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, results_path, write

NAME = "search"
TARGET, LIMIT = 0.9, 10.0
CONTENDER = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_train", foreign=True)

Settings = dict[str, str | int | float]

OURS: Settings = {
    "learning_rate": 1e-3,
    "batch_size": 16,
    "group_size": 8,
    "loss": "bnpo",
    "beta": 0.0,
    "epsilon": 0.2,
    "stop": "",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "optimizer": "adam",
}
THEIRS: Settings = {
    "learning_rate": 1e-5,
    "batch_size": 4,
    "group_size": 4,
    "loss": "grpo",
    "beta": 0.1,
    "epsilon": 1e-4,
    "stop": "</answer>",
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 20,
    "optimizer": "adam",
}
CHOICES: tuple[tuple[Settings, ...], ...] = (
    tuple({"learning_rate": rate} for rate in (1e-4, 3e-4, 1e-3, 2e-3, 4e-3)),
    tuple({"batch_size": size} for size in (4, 8, 16, 32)),
    tuple({"group_size": size} for size in (4, 8, 16)),
    tuple({"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3, 4e-3)),
    tuple({"batch_size": batch, "group_size": 16 // batch * 2} for batch in (4, 8, 16)),
    tuple({"batch_size": batch, "group_size": 16 // batch} for batch in (2, 4, 8)),
    ({"stop": ""}, {"stop": "</answer>"}),
    ({"beta": 0.0}, {"beta": 0.04}),
    ({"loss": "grpo"}, {"loss": "bnpo"}, {"loss": "dr_grpo"}),
    ({"epsilon": 0.2}, {"epsilon": 1e-4}),
    ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, {"temperature": 0.8, "top_p": 0.95, "top_k": 20}),
    ({"optimizer": "adam"}, {"optimizer": "adamw"}),
)
"""What is varied, in this order.

The learning rate is varied once more after the sizes, which it depends on, and then how 32 and 16 completions are
divided into groups: the library decodes as many at once as it has prompts in a batch.
"""


class Search:
    """Tries settings, each once."""

    def __init__(self, answers: Answers, seeds: int, command: str) -> None:
        self._answers, self._seeds, self._command = answers, seeds, command
        self.tried: list[tuple[Settings, list[dict[str, float]]]] = []

    def cost(self, settings: Settings) -> float:
        """Processor seconds to the target, the mean over the seeds; a run that fails costs the limit."""
        runs = next((runs for earlier, runs in self.tried if earlier == settings), None)
        if runs is None:
            runs = self._runs(settings)
            self.tried.append((settings, runs))
            sys.stderr.write(f"search: {cost_of(runs):8.2f} {settings} {runs}\n")
        return cost_of(runs)

    def _runs(self, settings: Settings) -> list[dict[str, float]]:
        case = settings | {"target": TARGET, "limit": LIMIT}
        runs: list[dict[str, float]] = []
        try:
            for _ in range(self._seeds):
                runs.append(self._answers.measure(case))
                if runs[-1]["accuracy"] < TARGET:
                    break
        except RuntimeError as error:
            sys.stderr.write(f"search: {settings}: {error}\n")
            runs.append({"processor_seconds": LIMIT, "accuracy": 0.0, "updates": 0})
        return runs

    def descend(self, settings: Settings) -> Settings:
        """Vary one setting after the other."""
        self.cost(settings)
        for choices in CHOICES:
            settings = min((settings | choice for choice in choices), key=self.cost)
        return settings

    def measurements(self) -> list[Measurement]:
        """What was tried, best first."""
        return [
            Measurement(
                question=NAME,
                case=settings,
                contender=CONTENDER.name,
                metric=metric,
                unit=unit,
                better="lower" if metric == "processor_seconds" else "higher",
                values=[run[metric] for run in runs],
                semantics=self._answers.semantics,
                versions=self._answers.versions,
                command=self._command,
                fingerprint=fingerprint(),
            )
            for settings, runs in sorted(self.tried, key=lambda one: cost_of(one[1]))
            for metric, unit in (("processor_seconds", "s"), ("accuracy", "share"))
        ]


def cost_of(runs: Sequence[dict[str, float]]) -> float:
    """The mean over the seeds, where all of them reached the target; what was given up comes behind all others."""
    given_up = runs[-1]["accuracy"] < TARGET
    return LIMIT + runs[-1]["processor_seconds"] if given_up else statistics.mean(r["processor_seconds"] for r in runs)


def main(argv: Sequence[str]) -> int:
    """Search from both starts; replace the file of results by what was tried."""
    parser = argparse.ArgumentParser(prog="python -m bench search", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=results_path(NAME))
    chosen = parser.parse_args(argv)
    with running(CONTENDER) as answers:
        search = Search(answers, chosen.seeds, "python -m bench search")
        for start in (OURS, THEIRS):
            search.descend(start)
            write(chosen.out, search.measurements())
    best = search.measurements()[0]
    sys.stdout.write(f"{best.case}: {best.median:.1f} s of processor time\n")
    return 0
