"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Finds the best settings of trainers for learn-m3 by coordinate search: each setting in turn, the best value is kept.

    python -m bench search [--of clotho] [--resume] [--out FILE]

`python -m bench peers` compares mlx-lm-lora, TRL and Clotho with these settings. All three start from the settings of
the profile with a constant learning rate, vary the learning rate and the sizes of batch and group over the same values
in the same order, try two options of their own (two other losses; for Clotho the advantage of MaxRL and the curriculum
by success rate), and then 0.6 and 1.4 times the best learning rate. Settings are ranked by the time of training to 0.7
with one seed, which `peers` does not measure: processor seconds for mlx-lm-lora and TRL, which use one thread, and
seconds on an idle machine for Clotho, which has several processes. A run is stopped when it has taken longer than the
best settings so far, after 400 updates, or, of mlx-lm-lora and TRL, when its accuracy falls below 0.1. Its settings
then rank behind all that reach the accuracy.

Every tried setting is stored at once; `--resume` continues a search that was stopped. An unfinished search is not used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from bench.contenders.clotho_train import FLAGS, NO_COLLAPSE_DETECTION
from bench.contenders.process import Contender, ContenderProcess, running
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, Metric, measured, read, results_path, write

NAME = "search"
RESULTS = results_path(NAME)
Settings = dict[str, str | int | float]

TARGET, LIMIT, BUDGET, FLOOR = 0.7, 3600.0, 14, 0.1
"""Accuracy to reach, limit of a run, number of settings to try, and accuracy below which a peer's run is stopped."""

LEARNING: Settings = {"profile": "learn", "updates": 400, "evaluate_every": 5}
ACCURACY = Metric(name="accuracy", unit="share", better="higher")
SEED = 1000
"""Seed of the search."""

MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_train", foreign=True)
TRL = Contender(name="trl", module="bench.contenders.trl_train", foreign=True, environment={"HF_HUB_OFFLINE": "1"})
CLOTHO = Contender(name="clotho", module="bench.contenders.clotho_train", environment={FLAGS: NO_COLLAPSE_DETECTION})

LEARNING_RATES = tuple[Settings, ...]({"learning_rate": rate} for rate in (2e-4, 5e-4, 1.5e-3, 3e-3, 6e-3))
SIZES = tuple[Settings, ...](
    {"batch_size": batch, "group_size": group}
    for batch, group in ((16, 16), (8, 16), (4, 16), (16, 8), (8, 8), (32, 8))
)
FINER = (0.6, 1.4)
"""Factors of the best learning rate, which are tried last, because it depends on the other settings."""

OTHER_LOSSES: tuple[Settings, ...] = ({"loss": "grpo"}, {"loss": "dr_grpo"})
OF_CLOTHO: tuple[Settings, ...] = ({"advantage": "max_rl"}, {"curriculum": "success_rate"})


class Subject(Struct, frozen=True, kw_only=True):
    """A trainer. cost: the metric that ranks settings. own: options that only it tries. start: the first settings."""

    contender: Contender
    cost: str
    own: tuple[Settings, ...]
    start: Settings

    @property
    def choices(self) -> tuple[tuple[Settings, ...], ...]:
        """The settings to vary, in this order."""
        return LEARNING_RATES, SIZES, self.own


def subject(contender: Contender, cost: str, own: tuple[Settings, ...], **fixed: str | float) -> Subject:
    """A trainer whose search starts from the settings of the profile. fixed: settings that do not vary."""
    start: Settings = {"learning_rate": 1.5e-3, "batch_size": 16, "group_size": 16, "temperature": 1.0, **fixed}
    return Subject(contender=contender, cost=cost, own=own, start=start)


SUBJECTS = {
    "mlx-lm-lora": subject(MLX_LM_LORA, "processor_seconds", OTHER_LOSSES, loss="bnpo", epsilon=0.2, optimizer="adam"),
    "trl": subject(TRL, "processor_seconds", OTHER_LOSSES, loss="bnpo"),
    "clotho": subject(
        CLOTHO, "seconds", OF_CLOTHO, objective="bnpo", schedule="constant", warmup_steps=0, asynchronous="false"
    ),
}


class Search:
    """Tries settings, each once. stored: called after every tried setting."""

    def __init__(self, answers: ContenderProcess, subject: Subject) -> None:
        self._answers, self._subject = answers, subject
        self.tried: list[tuple[Settings, dict[str, float]]] = []
        self.stored: Callable[[], None] = lambda: None

    def resume(self, measured: Sequence[Measurement]) -> None:
        """Take the settings that an earlier search tried from its measurements."""
        metric = self._subject.cost
        costs = [one for one in measured if one.metric == metric]
        accuracies = [one for one in measured if one.metric == "accuracy"]
        for cost, accuracy in zip(costs, accuracies, strict=True):
            self.tried.append((dict(cost.case), {metric: cost.values[0], "accuracy": accuracy.values[0]}))

    def cost(self, settings: Settings) -> float:
        """Seconds to the target. Infinite if the settings are not tried and the budget is spent."""
        run = next((run for earlier, run in self.tried if earlier == settings), None)
        if run is None:
            if len(self.tried) >= BUDGET:
                return math.inf
            run = self._run(settings)
            self.tried.append((settings, run))
            self.stored()
            sys.stderr.write(f"search: {cost_of(run, self._subject.cost):8.3f} {settings} {run}\n")
        return cost_of(run, self._subject.cost)

    def _run(self, settings: Settings) -> dict[str, float]:
        metric = self._subject.cost
        limit = min([LIMIT, *(cost_of(run, metric) for _, run in self.tried)])
        case = LEARNING | settings | {"seed": SEED, "target": TARGET}
        case |= {"limit_seconds": limit} if metric == "seconds" else {"limit": limit, "floor": FLOOR}
        try:
            return self._answers.measure(case)
        except RuntimeError as error:
            sys.stderr.write(f"search: {settings}: {error}\n")
            return {metric: LIMIT, "accuracy": 0.0}

    def descend(self) -> Settings:
        """Vary one setting after the other and return the best settings."""
        settings = self._subject.start
        self.cost(settings)
        for choices in self._subject.choices:
            settings = self._best_of(settings, choices)
        rate = float(settings["learning_rate"])
        return self._best_of(settings, [{"learning_rate": float(f"{rate * by:.3g}")} for by in FINER])

    def _best_of(self, settings: Settings, choices: Sequence[Settings]) -> Settings:
        return min((settings, *(settings | choice for choice in choices)), key=self.cost)

    def measurements(self) -> list[Measurement]:
        """All tried settings, best first."""
        here, name, answers = fingerprint(), self._subject.contender.name, self._answers
        cost = Metric(name=self._subject.cost, unit="s", better="lower")
        told = partial(measured, NAME, here=here, semantics=answers.semantics, versions=answers.versions)
        return [
            told(case=settings, contender=name, metric=metric, values=[run[metric.name]])
            for settings, run in sorted(self.tried, key=lambda one: cost_of(one[1], cost.name))
            for metric in (cost, ACCURACY)
        ]


def cost_of(run: dict[str, float], metric: str) -> float:
    """The metric if the run reached the target. Other settings rank behind all these, by accuracy."""
    return run[metric] if run["accuracy"] >= TARGET else LIMIT * (2 - run["accuracy"])


def best_settings(contender: str, path: Path = RESULTS) -> Settings | None:
    """The best settings that a search found; None if it is not finished, or if no settings reached the target."""
    tried = [one for one in read(path) if (one.contender, one.metric) == (contender, "accuracy")]
    return dict(tried[0].case) if len(tried) >= BUDGET and tried[0].values[0] >= TARGET else None


def main(argv: Sequence[str]) -> int:
    """Search, and replace the results of this trainer in the results file."""
    parser = argparse.ArgumentParser(prog="python -m bench search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--of", choices=list(SUBJECTS), default="clotho", help="The trainer.")
    parser.add_argument("--resume", action="store_true", help="Keep the tried settings of the results file.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Results file.")
    chosen = parser.parse_args(argv)
    subject, known = SUBJECTS[chosen.of], read(chosen.out)
    others = [one for one in known if one.contender != chosen.of]
    with running(subject.contender) as answers:
        search = Search(answers, subject)
        search.stored = lambda: write(chosen.out, [*others, *search.measurements()])
        if chosen.resume:
            search.resume([one for one in known if one.contender == chosen.of])
        search.descend()
    best = search.measurements()[0]
    sys.stdout.write(f"{best.case}: {best.median:.3f} {best.unit}, {best.metric}\n")
    return 0
