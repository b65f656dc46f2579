"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Finds the best settings of trainers for a task by coordinate search: each setting in turn, the best value is kept.

    python -m bench search [--task startup] [--of clotho] [--seeds 3] [--resume] [--out FILE]

Every tried setting is stored at once; `--resume` continues a search that was stopped. An unfinished search of the task
learn is not used by other benchmarks. A run that does not reach the target accuracy within the limit is stopped, and
its settings rank behind all others.

startup: profile local-m3 until 0.9, for `python -m bench startup_training`. The search for mlx-lm-lora starts twice:
from the settings of local-m3 and from the library's defaults. Its settings are ranked by processor seconds of training,
averaged over seeds; processor seconds are comparable on a shared machine. The search for Clotho starts from a constant
learning rate that suits one update, without collapse detection, which the others do not have. Its settings are ranked
by wall-clock seconds on an idle machine, because asynchronous work for later updates also uses processor time. Limits:
10 processor seconds; for Clotho, 10 seconds and four updates.

learn: profile learn-m3 until 0.7, for `python -m bench time_to_accuracy`: mlx-lm-lora, TRL and Clotho, synchronous. All
three start from the settings of the profile with a constant learning rate, vary the learning rate and the sizes of
batch and group over the same values in the same order, try two options of their own (two other losses; for Clotho the
advantage of MaxRL and the curriculum by success rate), and then 0.6 and 1.4 times the best learning rate. Settings are
ranked by the time of training with one seed, which `time_to_accuracy` does not measure: processor seconds for
mlx-lm-lora and TRL, which use one thread, and seconds on an idle machine for Clotho, which has several processes. A run
is stopped when it has taken longer than the best settings so far, after 400 updates, or, of mlx-lm-lora and TRL, when
its accuracy falls below 0.1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bench.contenders.clotho_train import FLAGS, NO_COLLAPSE_DETECTION
from bench.contenders.process import Contender, ContenderProcess, running
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, read, results_path, write

NAME = "search"

Settings = dict[str, str | int | float]


class Subject(Struct, frozen=True, kw_only=True):
    """What is searched.

    cost: the metric that ranks settings. choices: the settings to vary, in this order. finer: factors of the best
    learning rate, which are tried last, because it depends on the other settings.
    """

    contender: Contender
    cost: str
    starts: tuple[Settings, ...]
    choices: tuple[tuple[Settings, ...], ...]
    finer: tuple[float, ...] = ()


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

MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_train", foreign=True)
TRL = Contender(name="trl", module="bench.contenders.trl_train", foreign=True, environment={"HF_HUB_OFFLINE": "1"})
CLOTHO = Contender(name="clotho", module="bench.contenders.clotho_train", environment={FLAGS: NO_COLLAPSE_DETECTION})


class SearchTask(Struct, frozen=True, kw_only=True):
    """What the trainers are to reach. case: keys of every case. limit: of a run, in the unit of the subject's cost.

    budget: number of settings that are tried for each subject. racing: the limit is lowered to the seconds of the best
    settings so far. floor: a run of another project is stopped when its accuracy falls below. seeds: number of seeds.
    results: the results file.
    """

    target: float
    limit: float
    subjects: Mapping[str, Subject]
    seeds: int
    results: Path
    case: Settings = {}
    budget: float = math.inf
    racing: bool = False
    floor: float = 0.0


LEARNING_RATES = tuple[Settings, ...]({"learning_rate": rate} for rate in (2e-4, 5e-4, 1.5e-3, 3e-3, 6e-3))
SIZES = tuple[Settings, ...](
    {"batch_size": batch, "group_size": group}
    for batch, group in ((16, 16), (8, 16), (4, 16), (16, 8), (8, 8), (32, 8))
)
FINER = (0.6, 1.4)
"""Factors of the best learning rate."""

OTHER_LOSSES: tuple[Settings, ...] = ({"loss": "grpo"}, {"loss": "dr_grpo"})
OF_CLOTHO: tuple[Settings, ...] = ({"advantage": "max_rl"}, {"curriculum": "success_rate"})


def learning_subject(contender: Contender, cost: str, own: tuple[Settings, ...], **fixed: str | float) -> Subject:
    """A trainer on learn-m3; its search starts from the settings of the profile.

    cost: as in Subject. own: options that only this trainer tries. fixed: settings that do not vary.
    """
    start: Settings = {"learning_rate": 1.5e-3, "batch_size": 16, "group_size": 16, "temperature": 1.0, **fixed}
    choices = (LEARNING_RATES, SIZES, own)
    return Subject(contender=contender, cost=cost, starts=(start,), choices=choices, finer=FINER)


LEARNING: Settings = {"profile": "learn", "updates": 400, "evaluate_every": 5}
TASKS = {
    "startup": SearchTask(
        target=0.9,
        limit=10.0,
        seeds=3,
        results=results_path(NAME),
        subjects={
            "mlx-lm-lora": Subject(
                contender=MLX_LM_LORA,
                cost="processor_seconds",
                starts=(OF_THE_PROFILE, OF_THE_LIBRARY),
                choices=THEIR_CHOICES,
            ),
            "clotho": Subject(contender=CLOTHO, cost="seconds", starts=(BOLD,), choices=OUR_CHOICES),
        },
    ),
    "learn": SearchTask(
        target=0.7,
        limit=3600.0,
        seeds=1,
        results=results_path("search_learn"),
        case=LEARNING | {"seed": 1000},
        budget=14,
        racing=True,
        floor=0.1,
        subjects={
            "mlx-lm-lora": learning_subject(
                MLX_LM_LORA, "processor_seconds", OTHER_LOSSES, loss="bnpo", epsilon=0.2, optimizer="adam"
            ),
            "trl": learning_subject(TRL, "processor_seconds", OTHER_LOSSES, loss="bnpo"),
            "clotho": learning_subject(
                CLOTHO,
                "seconds",
                OF_CLOTHO,
                objective="bnpo",
                schedule="constant",
                warmup_steps=0,
                asynchronous="false",
            ),
        },
    ),
}


class Search:
    """Tries settings, each once."""

    def __init__(self, answers: ContenderProcess, task: SearchTask, subject: Subject, seeds: int, command: str) -> None:
        self._answers, self._task, self._subject = answers, task, subject
        self._seeds, self._command = seeds, command
        self.tried: list[tuple[Settings, list[dict[str, float]]]] = []
        self.stored: Callable[[], None] = lambda: None
        """Called after every tried setting."""

    def resume(self, measured: Sequence[Measurement]) -> None:
        """Take the settings that an earlier search tried from its measurements."""
        metric = self._subject.cost
        costs = [one for one in measured if one.metric == metric]
        accuracies = [one for one in measured if one.metric == "accuracy"]
        for cost, accuracy in zip(costs, accuracies, strict=True):
            runs = [
                {metric: seconds, "accuracy": reached}
                for seconds, reached in zip(cost.values, accuracy.values, strict=True)
            ]
            self.tried.append((dict(cost.case), runs))

    def cost(self, settings: Settings) -> float:
        """Mean seconds to the target over the seeds. Infinite if the settings are not tried and the budget is spent."""
        runs = next((runs for earlier, runs in self.tried if earlier == settings), None)
        if runs is None:
            if len(self.tried) >= self._task.budget:
                return math.inf
            runs = self._runs(settings)
            self.tried.append((settings, runs))
            self.stored()
            sys.stderr.write(f"search: {self._cost_of(runs):8.3f} {settings} {runs}\n")
        return self._cost_of(runs)

    def _cost_of(self, runs: Sequence[dict[str, float]]) -> float:
        return cost_of(runs, self._subject.cost, self._task)

    def _runs(self, settings: Settings) -> list[dict[str, float]]:
        limit = self._task.limit
        if self._task.racing:
            limit = min([limit, *(self._cost_of(runs) for _, runs in self.tried)])
        limited = {"processor_seconds": "limit", "seconds": "limit_seconds"}[self._subject.cost]
        case = self._task.case | settings | {"target": self._task.target, limited: limit}
        if limited == "limit":
            case["floor"] = self._task.floor
        runs: list[dict[str, float]] = []
        try:
            for _ in range(self._seeds):
                runs.append(self._answers.measure(case))
                if runs[-1]["accuracy"] < self._task.target:
                    break
        except RuntimeError as error:
            sys.stderr.write(f"search: {settings}: {error}\n")
            runs.append({self._subject.cost: self._task.limit, "accuracy": 0.0, "updates": 0})
        return runs

    def descend(self, settings: Settings) -> Settings:
        """Vary one setting after the other and return the best settings."""
        self.cost(settings)
        for choices in self._subject.choices:
            settings = self._best_of(settings, choices)
        rate = float(settings["learning_rate"])
        return self._best_of(settings, [{"learning_rate": float(f"{rate * by:.3g}")} for by in self._subject.finer])

    def _best_of(self, settings: Settings, choices: Sequence[Settings]) -> Settings:
        return min((settings, *(settings | choice for choice in choices)), key=self.cost)

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
            for settings, runs in sorted(self.tried, key=lambda one: self._cost_of(one[1]))
            for metric, unit in ((self._subject.cost, "s"), ("accuracy", "share"))
        ]


def cost_of(runs: Sequence[dict[str, float]], metric: str, task: SearchTask) -> float:
    """Mean over the seeds if all runs reached the target. Other settings rank behind all these, by accuracy."""
    if (accuracy := runs[-1]["accuracy"]) < task.target:
        return task.limit * (2 - accuracy)
    return statistics.mean(run[metric] for run in runs)


def best_settings(task: str, contender: str) -> Settings | None:
    """The best settings that a search found; None if it is not finished, or if no settings reached the target.

    A task without a limit on the number of settings has no unfinished results.
    """
    chosen = TASKS[task]
    tried = [one for one in read(chosen.results) if (one.contender, one.metric) == (contender, "accuracy")]
    if not tried or len(tried) < chosen.budget < math.inf or min(tried[0].values) < chosen.target:
        return None
    return dict(tried[0].case)


def main(argv: Sequence[str]) -> int:
    """Search from every start and replace the results of this contender in the results file."""
    parser = argparse.ArgumentParser(prog="python -m bench search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--task", choices=list(TASKS), default="startup")
    parser.add_argument("--of", choices=list(TASKS["learn"].subjects), default="mlx-lm-lora", help="The trainer.")
    parser.add_argument("--seeds", type=int, help="Number of seeds; default: 3 for startup, 1 for learn.")
    parser.add_argument("--resume", action="store_true", help="Keep the tried settings of the results file.")
    parser.add_argument("--out", type=Path, help="Results file; default: that of the task.")
    chosen = parser.parse_args(argv)
    task = TASKS[chosen.task]
    if chosen.of not in task.subjects:
        parser.error(f"--task {chosen.task} is for {' and '.join(task.subjects)}")
    subject, out = task.subjects[chosen.of], chosen.out or task.results
    known = read(out)
    others = [one for one in known if one.contender != chosen.of]
    command = "python -m bench search"
    command += "" if chosen.task == "startup" else f" --task {chosen.task}"
    command += "" if chosen.of == "mlx-lm-lora" else f" --of {chosen.of}"
    with running(subject.contender) as answers:
        search = Search(answers, task, subject, chosen.seeds or task.seeds, command)
        search.stored = lambda: write(out, [*others, *search.measurements()])
        if chosen.resume:
            search.resume([one for one in known if one.contender == chosen.of])
        for start in subject.starts:
            search.descend(start)
    best = search.measurements()[0]
    sys.stdout.write(f"{best.case}: {best.median:.3f} {best.unit}, {best.metric}\n")
    return 0
