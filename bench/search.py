"""On Linux, Clotho's decode step is NumPy and BLAS (clotho/cpu); nothing here was measured on Metal.

Finds the best settings for the task of profile local-m3, for mlx-lm-lora's GRPO and for Clotho, by coordinate search.

    python -m bench search [--of clotho] [--seeds 3] [--out bench/results/search.jsonl]

One setting after the other is varied, and the best value is kept. The search for mlx-lm-lora starts twice: from the
settings of local-m3 and from the library's defaults. Its settings are ranked by processor seconds of training until the
greedy accuracy on all held-out problems reaches 0.9, averaged over seeds; processor seconds are comparable on a shared
machine. The search for Clotho starts from a constant learning rate that suits one update, without collapse detection,
which the others do not have. Its settings are ranked by wall-clock seconds on an idle machine, because asynchronous
work for later updates also uses processor time. A run that does not reach the target in 10 processor seconds, or in
four updates of Clotho, is stopped, and its settings rank behind all others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from bench.contenders.clotho_train import FLAGS, NO_COLLAPSE_DETECTION
from bench.contenders.process import Contender, ContenderProcess, running
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, read, results_path, write

NAME = "search"
TARGET, LIMIT = 0.9, 10.0

Settings = dict[str, str | int | float]


class Subject(Struct, frozen=True, kw_only=True):
    """What is searched. cost: the metric that ranks settings. choices: the settings to vary, in this order."""

    contender: Contender
    cost: str
    starts: tuple[Settings, ...]
    choices: tuple[tuple[Settings, ...], ...]


OF_THE_PROFILE: Settings = {
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
OF_THE_LIBRARY: Settings = {
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
THEIR_CHOICES: tuple[tuple[Settings, ...], ...] = (
    tuple({"learning_rate": rate} for rate in (1e-4, 3e-4, 1e-3, 2e-3, 4e-3)),
    tuple({"batch_size": size} for size in (4, 8, 16, 32)),
    tuple({"group_size": size} for size in (4, 8, 16)),
    tuple({"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3, 4e-3)),
    tuple({"batch_size": batch, "group_size": 16 // batch * 2} for batch in (4, 8, 16)),
    tuple({"batch_size": batch, "group_size": 16 // batch} for batch in (2, 4, 8)),
    tuple({"batch_size": batch, "group_size": 12 // batch} for batch in (2, 4, 6)),
    ({"stop": ""}, {"stop": "</answer>"}),
    ({"beta": 0.0}, {"beta": 0.04}),
    ({"loss": "grpo"}, {"loss": "bnpo"}, {"loss": "dr_grpo"}),
    ({"epsilon": 0.2}, {"epsilon": 1e-4}),
    ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, {"temperature": 0.8, "top_p": 0.95, "top_k": 20}),
    ({"optimizer": "adam"}, {"optimizer": "adamw"}),
)
"""The learning rate is varied again after the sizes, because it depends on them. Then 32, 16 and 12 completions are
divided into groups: the library decodes as many completions at once as it has prompts in a batch.
"""

BOLD: Settings = {
    "profile": "arithmetic",
    "updates": 4,
    "schedule": "constant",
    "warmup_steps": 0,
    "learning_rate": 6e-3,
    "batch_size": 4,
    "group_size": 4,
    "asynchronous": "false",
}
RATES = tuple[Settings, ...]({"learning_rate": rate} for rate in (3e-3, 4e-3, 6e-3, 8e-3, 1e-2))
OUR_CHOICES: tuple[tuple[Settings, ...], ...] = (
    RATES,
    tuple(
        {"batch_size": batch, "group_size": group}
        for batch, group in ((2, 4), (2, 6), (3, 4), (2, 8), (4, 4), (4, 8), (8, 2), (8, 4))
    ),
    RATES,
    tuple({"temperature": temperature} for temperature in (0.8, 1.0, 1.2)),
    ({"asynchronous": "false"}, {"asynchronous": "true"}),
)

SUBJECTS = {
    "mlx-lm-lora": Subject(
        contender=Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_train", foreign=True),
        cost="processor_seconds",
        starts=(OF_THE_PROFILE, OF_THE_LIBRARY),
        choices=THEIR_CHOICES,
    ),
    "clotho": Subject(
        contender=Contender(
            name="clotho", module="bench.contenders.clotho_train", environment={FLAGS: NO_COLLAPSE_DETECTION}
        ),
        cost="seconds",
        starts=(BOLD,),
        choices=OUR_CHOICES,
    ),
}


class Search:
    """Tries settings, each once."""

    def __init__(self, answers: ContenderProcess, subject: Subject, seeds: int, command: str) -> None:
        self._answers, self._subject, self._seeds, self._command = answers, subject, seeds, command
        self.tried: list[tuple[Settings, list[dict[str, float]]]] = []

    def cost(self, settings: Settings) -> float:
        """Mean seconds to the target over the seeds; a run that fails costs the limit."""
        runs = next((runs for earlier, runs in self.tried if earlier == settings), None)
        if runs is None:
            runs = self._runs(settings)
            self.tried.append((settings, runs))
            sys.stderr.write(f"search: {cost_of(runs, self._subject.cost):8.3f} {settings} {runs}\n")
        return cost_of(runs, self._subject.cost)

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
            runs.append({self._subject.cost: LIMIT, "accuracy": 0.0, "updates": 0})
        return runs

    def descend(self, settings: Settings) -> Settings:
        """Vary one setting after the other and return the best settings."""
        self.cost(settings)
        for choices in self._subject.choices:
            settings = min((settings | choice for choice in choices), key=self.cost)
        return settings

    def measurements(self) -> list[Measurement]:
        """All tried settings, best first."""
        here = fingerprint()
        return [
            Measurement(
                question=NAME,
                case=settings,
                contender=self._subject.contender.name,
                metric=metric,
                unit=unit,
                better="higher" if metric == "accuracy" else "lower",
                values=[run[metric] for run in runs],
                semantics=self._answers.semantics,
                versions=self._answers.versions,
                command=self._command,
                fingerprint=here,
            )
            for settings, runs in sorted(self.tried, key=lambda one: cost_of(one[1], self._subject.cost))
            for metric, unit in ((self._subject.cost, "s"), ("accuracy", "share"))
        ]


def cost_of(runs: Sequence[dict[str, float]], metric: str) -> float:
    """Mean over the seeds if all runs reached the target; stopped runs rank behind all others."""
    given_up = runs[-1]["accuracy"] < TARGET
    return LIMIT + runs[-1][metric] if given_up else statistics.mean(run[metric] for run in runs)


def main(argv: Sequence[str]) -> int:
    """Search from every start and replace the results of this contender in the results file."""
    parser = argparse.ArgumentParser(prog="python -m bench search", description=__doc__)
    parser.add_argument("--of", choices=list(SUBJECTS), default="mlx-lm-lora")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=results_path(NAME))
    chosen = parser.parse_args(argv)
    subject = SUBJECTS[chosen.of]
    others = [one for one in read(chosen.out) if one.contender != chosen.of] if chosen.out.exists() else []
    command = "python -m bench search" + ("" if chosen.of == "mlx-lm-lora" else f" --of {chosen.of}")
    with running(subject.contender) as answers:
        search = Search(answers, subject, chosen.seeds, command)
        for start in subject.starts:
            search.descend(start)
            write(chosen.out, [*others, *search.measurements()])
    best = search.measurements()[0]
    sys.stdout.write(f"{best.case}: {best.median:.3f} {best.unit}, {best.metric}\n")
    return 0
