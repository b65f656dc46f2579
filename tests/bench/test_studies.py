"""The studies: valid settings, and what they read from the files of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from attachments.doctor.completions import learnability as estimate
from attachments.reasoning_gym.sections import TABLES
from bench import learning
from bench.runs import Record
from bench.studies import (
    agents,
    curriculum,
    distillation,
    environments,
    gym,
    learnability,
    methods,
    proof,
    speculation,
    warm_up,
)
from bench.studies.curriculum import mixture, rollouts_at
from bench.studies.environments import permutation_test
from bench.studies.runner import Arm, Point, Study
from bench.studies.speculation import STEPS_OF_EPOCH, epochs
from profiles.times_table_maker.problems import long_multiplication
from protocols.rollout import RolloutGroup, ScoredGroup
from tests.bench.made_measurements import made_trial
from tests.training_run.records.display_examples import completion, prompt
from training_run.profile.flags import parse_arguments
from training_run.profile.keys import CHOICES
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile

STUDIES: tuple[Any, ...] = (
    learning, methods, curriculum, distillation, gym, environments, agents, learnability, speculation, warm_up, proof,
)  # fmt: skip
ARMS = [(module.STUDY, arm) for module in STUDIES for arm in module.STUDY.arms]


def profile_of(study: Study, arm: Arm, *, quick: bool = False) -> Profile:
    """The profile of an arm."""
    arguments = parse_arguments(study.flags_of(arm, quick=quick))
    return load_profile(arguments.profile, arguments.overrides)


@pytest.mark.parametrize(("study", "arm"), ARMS, ids=[f"{study.name} {arm.name}" for study, arm in ARMS])
def test_every_arm_has_valid_settings(study: Study, arm: Arm) -> None:
    """Also in quick mode, and a reference that exists."""
    for quick in (False, True):
        profile_of(study, arm, quick=quick)
    assert arm.reference in ("", *(one.name for one in study.arms))


@pytest.mark.parametrize("module", STUDIES, ids=lambda module: module.NAME)
def test_every_table_has_a_row_for_every_measured_arm(module: Any) -> None:
    """With a cell for every heading, because Markdown renders no table otherwise."""
    trials = module.read()
    text = module.table(trials)
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        heading, rule, *rows = block.splitlines()
        assert {len(line.split("|")) for line in (rule, *rows)} == {len(heading.split("|"))}
    assert all(f"| {arm} |" in text for arm in {one.arm for one in trials})
    assert module.STUDY.command in text


def test_the_names_of_arms_are_unique() -> None:
    """The command line selects arms by name."""
    for module in STUDIES:
        names = [arm.name for arm in module.STUDY.arms]
        assert len(set(names)) == len(names)


MEASURED = {
    "learner.objective.type": "--learner.objective",
    "learner.objective.importance_correction.type": "--learner.objective.importance-correction",
    "learner.step_scale.type": "--learner.step-scale",
}


@pytest.mark.parametrize("key", MEASURED)
def test_every_objective_and_every_correction_is_measured(key: str) -> None:
    """A new one needs a line in bench/studies/methods.toml, unless it learns demonstrations."""
    flags = [" ".join(arm.flags) for arm in methods.STUDY.arms]
    names = [name for name in CHOICES[key] if name not in ("custom", "off", "sft")]
    assert names
    assert [name for name in names if not any(f"{MEASURED[key]} {name}" in words for words in flags)] == []


def test_the_objectives_of_the_user_page_have_their_definitions() -> None:
    """One row per objective that was measured."""
    trials = [made_trial([0.3, 0.8], arm=name) for name in ("profile", "grpo", "dapo")]
    rows = methods.objectives(trials).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["`grpo`", "`dapo`"]
    assert {len(row.split("|")) for row in methods.objectives(trials).splitlines()} == {len(rows[0].split("|"))}


@pytest.mark.parametrize("module", [learning, methods], ids=["learning", "methods"])
def test_the_chart_has_every_arm(module: Any, tmp_path: Path) -> None:
    """Drawn from the results."""
    pytest.importorskip("matplotlib")
    trials = module.read()
    module.draw(trials, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert all(one.arm in text for one in trials)


@pytest.mark.parametrize("arm", gym.STUDY.arms, ids=lambda arm: arm.name)
def test_a_dataset_replaces_problems_and_rewards_of_the_profile(arm: Arm) -> None:
    """With its settings."""
    profile = profile_of(gym.STUDY, arm)
    assert profile.data.train == f"reasoning_gym:{arm.name}"
    assert [table.dataset for table in TABLES.of(profile.data)] == [arm.name]
    assert [reward.name for reward in profile.rewards] == ["reasoning_gym"]


def test_tokens_are_divided_by_forward_passes() -> None:
    """Per epoch, over all of its steps. A run without speculation counts no passes: each samples one token."""
    steps = [(100, 0, 1.0)] * STEPS_OF_EPOCH + [(100, 50, 0.5), (200, 25, 0.25)] * (STEPS_OF_EPOCH // 2)
    lines = [
        {
            "time/run": 2.0 * (i + 1), "tokens_per_second": tokens / 2.0, "speculation/passes": passes,
            "time/decode": seconds,
        }
        for i, (tokens, passes, seconds) in enumerate(steps)
    ]  # fmt: skip
    found = epochs(Record(lines, [], {}, 0.0))
    assert found == {
        "per pass 1": 1.0, "rate 1": 100.0, "per pass 2": pytest.approx(4.0), "rate 2": pytest.approx(400.0)
    }  # fmt: skip


def test_rewards_of_environments_are_those_of_the_first_and_the_last_third() -> None:
    """One update at least. Groups count per environment, whether they were trained on or discarded."""
    lines = [
        {
            "reward/mean": reward,
            "environments": {"a": {"groups/trained": 2, "groups/discarded": 1, "logprob_error_max": error}},
        }
        for reward, error in ((0.1, None), (0.5, 1e-4), (0.9, 1e-5))
    ]
    found = environments.environment_values(Record(lines, [], {}, 0.0))
    assert (found["early"], found["late"], found["groups of a"], found["logprob_error"]) == (0.1, 0.9, 9, 1e-4)
    short = environments.environment_values(Record(lines[:2], [], {}, 0.0))
    assert (short["early"], short["late"]) == (0.1, 0.5)


def test_the_largest_possible_difference_is_significant() -> None:
    """Ten values against ten larger ones: one split of 184,756. Equal values are not significant."""
    assert permutation_test([0.0] * 10, [1.0] * 10) < 1e-3
    assert permutation_test([0.5] * 10, [0.5] * 10) == 1.0
    assert permutation_test([1.0] * 10, [0.0] * 10) == 1.0


def test_half_of_the_mixed_problems_are_useless() -> None:
    """Equally many are solved and too hard; the seed decides which."""
    rates = {str(i): rate for i, rate in enumerate([1.0] * 30 + [0.0] * 20 + [0.1, 0.9] * 40)}
    problems = [{"prompt": prompt} for prompt in rates]

    def mixed(seed: int) -> list[dict[str, Any]]:
        return mixture(problems, rates, too_hard="never solved", seed=seed)

    counts = Counter(rates[problem["prompt"]] for problem in mixed(0))
    assert (counts[1.0], counts[0.0], counts[0.1] + counts[0.9]) == (20, 20, 40)
    assert mixed(0) == mixed(0) != mixed(1)
    with pytest.raises(ValueError, match="hard problems"):
        mixture(problems, dict.fromkeys(rates, 1.0), too_hard="never solved", seed=0)


def test_problems_that_are_too_long_take_more_tokens_than_a_completion_has() -> None:
    """They replace the problems that were never solved, which are among the others."""
    rates = {str(i): rate for i, rate in enumerate([1.0] * 20 + [0.0] * 30 + [0.5] * 30)}
    mixed = mixture([{"prompt": prompt} for prompt in rates], rates, too_hard="too long", seed=0)
    long = [problem for problem in mixed if problem["prompt"] not in rates]
    assert len(long) == 20
    assert len([problem for problem in mixed if rates.get(problem["prompt"]) == 1.0]) == 20
    profile = load_profile("learn-m3")
    tokenizer = Tokenizer.from_file(str(Path(profile.model.path, "tokenizer.json")))
    for problem in long:
        number, row = (int(text) for text in re.findall(r"\d+", problem["prompt"]))
        work, answer = long_multiplication(number, row)
        assert answer == problem["answer"] == str(number * row)
        text = f"<think>{','.join(work)}</think><answer>{answer}"
        assert len(tokenizer.encode(text).ids) > profile.sampling.max_tokens


@pytest.mark.parametrize(
    ("correct", "expected"),
    [([8] * 8, "solved"), ([4] * 8, "learned"), ([0] * 8, "not learned"), ([0, 8] * 4, "not learned")],
)
def test_every_line_of_doctor_forecasts_an_outcome(correct: list[int], expected: str) -> None:
    """By the words of its advice, with pass@1 and pass@k. correct: of eight completions of each problem."""
    outcomes = [
        ScoredGroup(
            group=RolloutGroup(prompt=prompt(), completions=(completion(),) * 8),
            rewards=(0.0,) * 8, parts={}, correct=tuple(i < number for i in range(8)),
        )
        for number in correct
    ]  # fmt: skip
    found = learnability.forecast_of(estimate(outcomes, batch_size=16))
    assert learnability.OUTCOMES[int(found["forecast"])] == expected
    assert (found["k"], found["pass@1"]) == (8, sum(correct) / 64)


@pytest.mark.parametrize(
    ("curve", "rollouts"),
    [
        ([(0, 0.2), (100, 0.6), (200, 0.8), (300, 0.5)], 150.0),
        ([(0, 0.8)], 0.0),
        ([(0, 0.2), (100, 0.7)], 100.0),
        ([(0, 0.2), (100, 0.6)], None),
    ],
)
def test_rollouts_at_the_target_are_interpolated(curve: list[tuple[int, float]], rollouts: float | None) -> None:
    """Between the two evaluations around it."""
    points = [Point(0, 0.0, count, accuracy) for count, accuracy in curve]
    assert rollouts_at(points, 0.7) == (None if rollouts is None else pytest.approx(rollouts))


def test_both_curricula_have_the_same_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the held-out problems of the profile: a run with other problems for training would hold out some of them."""

    def rates() -> dict[str, float]:
        lines = Path(load_profile("learn-m3").data.train).read_text(encoding="utf-8").splitlines()
        prompts = [re.search(r'"prompt": "([^"]*)"', line) for line in lines]
        return {found[1]: (0.0, 0.4, 0.5, 1.0)[i % 4] for i, found in enumerate(prompts) if found}

    monkeypatch.setattr(curriculum, "success_rates", rates)
    seen = set()
    for arm in curriculum.STUDY.arms:
        given = curriculum.problems_of(arm, 3, tmp_path)
        assert given[2:] == ("--data.heldout", load_profile("learn-m3").data.heldout)
        seen.add(Path(given[1]).read_text(encoding="utf-8"))
    assert len(seen) == len(curriculum.TOO_HARD)


def test_a_rate_that_a_run_does_not_have_is_no_value() -> None:
    """A synchronous run never decodes during an update."""
    last = {"decode_tokens_per_second/idle": 5.0, "decode_tokens_per_second/learning": None}
    read: Callable[[Record], dict[str, float]] = learning.rates
    assert read(Record([{}, last], [], {}, 0.0)) == {"idle": 5.0}
