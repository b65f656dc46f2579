"""`methods`: its definitions, and the statements of its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from bench import methods
from bench.methods import DEFINITIONS, Family, difference, until
from bench.trials import ALWAYS, QUICK, Method, Outcome, merged
from tests.bench.made_measurements import made_trial
from training_run.profile.flags import parse_arguments
from training_run.profile.keys import CHOICES
from training_run.profile.load import load_profile

METHODS = DEFINITIONS.methods()


def outcome(name: str, *finals: float, family: str = DEFINITIONS.families[0].title, status: int = 0) -> Outcome:
    """A method whose seeds reach these accuracies, half of them after ten updates."""
    made = [made_trial([0.3, final / 2, final], seed=seed, status=status) for seed, final in enumerate(finals)]
    return Outcome(method=Method(name=name, family=family), trials=tuple(made))


@pytest.mark.parametrize("quick", ["", QUICK], ids=["full", "quick"])
def test_every_method_has_valid_settings(quick: str) -> None:
    """Names are unique, because the command line selects methods by name."""
    assert len({method.name for method in METHODS}) == len(METHODS)
    for method in METHODS:
        for choice in method.choices or ("",):
            words = merged(("--profile", DEFINITIONS.profile), DEFINITIONS.flags, ALWAYS, method.flags, quick, choice)
            arguments = parse_arguments(words)
            load_profile(arguments.profile, arguments.overrides)


MEASURED = {
    "learner.objective.type": "--learner.objective",
    "learner.objective.importance_correction.type": "--learner.objective.importance-correction",
    "learner.step_scale.type": "--learner.step-scale",
}


@pytest.mark.parametrize("key", MEASURED)
def test_every_objective_and_every_correction_is_measured(key: str) -> None:
    """A new one needs a line in bench/methods.toml."""
    flags = [" ".join(method.flags) for method in METHODS]
    names = [name for name in CHOICES[key] if name not in ("custom", "none")]
    assert names
    assert [name for name in names if not any(f"{MEASURED[key]} {name}" in words for words in flags)] == []


def test_deliberately_bad_settings_are_compared_with_the_profile() -> None:
    """The difference of the means and both spreads, after training and averaged over the run."""
    family = Family(title="bad", methods={"bad": ""}, contrast=True)
    profile = outcome("profile", 0.8, 0.9)
    [table] = methods.comparison(family, [profile, outcome("bad", 0.4, 0.5)], profile)
    assert table.splitlines()[2:] == ["| `profile`, `bad` | **0.400 (0.100, 0.100)** | **0.200 (0.050, 0.050)** |"]


def test_the_table_of_objectives_has_their_definitions_and_accuracies() -> None:
    """The settings of the profile are no objective."""
    rows = methods.objectives([outcome("profile", 0.8), outcome("gspo", 0.8, 0.9)]).splitlines()[2:]
    assert len(rows) == 1
    assert rows[0].startswith("| `gspo` | Group Sequence Policy Optimization")
    assert "| 0.850 (0.800 to 0.900) |" in rows[0]


@pytest.mark.parametrize(
    ("other", "expected"), [((0.70, 0.72), "**0.110 (0.040, 0.020)**"), ((0.60, 0.84), "0.100 (0.040, 0.240)")]
)
def test_a_difference_that_exceeds_both_spreads_is_bold(other: Sequence[float], expected: str) -> None:
    """A wide spread of one of them is enough for doubt."""
    assert difference(outcome("a", 0.80, 0.84), outcome("b", *other)) == expected


def test_one_seed_has_no_spread() -> None:
    """So that nothing is said about the difference."""
    assert difference(outcome("a", 0.8), outcome("b", 0.1, 0.2)) == "0.650 (one seed)"


def test_best_and_worst_of_a_family_are_named() -> None:
    """By mean accuracy after training, and by mean accuracy over the run."""
    family = Family(title="objectives", methods={}, compare=True)
    slow = outcome("slow", 0.9)
    fast = Outcome(method=slow.method, trials=(made_trial([0.3, 0.8, 0.8]),))
    fast = structs.replace(fast, method=structs.replace(slow.method, name="fast"))
    [table] = methods.comparison(family, [slow, fast, outcome("worst", 0.6)], None)
    *_, after, average, _ = table.splitlines()[-1].split("|")
    assert after.startswith(" `slow`, `worst`: ")
    assert average.startswith(" `fast`, `worst`: ")


def test_the_average_over_a_run_is_the_area_under_its_learning_curve() -> None:
    """Divided by the number of updates. A curve of one evaluation has its accuracy."""
    assert made_trial([0.2, 0.6, 0.8]).average == pytest.approx((0.4 * 10 + 0.7 * 10) / 20)
    assert made_trial([0.2]).average == 0.2


def test_updates_and_completions_to_an_accuracy_are_medians_of_the_seeds_that_reach_it() -> None:
    """The cell says how many do, if not all."""
    assert until(outcome("a", 0.8, 0.9), 0.7, "step") == "20"
    assert until(outcome("a", 0.8, 0.9), 0.7, "rollouts") == "160"
    assert until(outcome("a", 0.8, 0.6), 0.7, "step") == "20 (1 of 2 seeds)"
    assert until(outcome("a", 0.2), 0.7, "step") == "never"


def test_the_table_has_a_row_per_method_and_marks_failed_runs() -> None:
    """One table per family that has results."""
    family = DEFINITIONS.families[0].title
    lines = methods.table([outcome("grpo", 0.8, 0.9), outcome("gspo", 0.5, 0.6, status=1)]).splitlines()
    assert lines[0] == f"**{family}**"
    assert "| `grpo` | 0.800 | 0.900 | 0.850 | 0.100 | 0.500 (0.475 to 0.525) | 20 | 160 | 160 | 11 | 5 MB |" in lines
    assert (
        "| `gspo` | 0.500* | 0.600* | 0.550 | 0.100 | 0.350 (0.325 to 0.375) | never | never | 160 | 11 | 5 MB |"
        in lines
    )
    assert "*: the run ended with an error" in lines[-3]
    assert sum(line.startswith("**") for line in lines) == 1


def test_the_chart_has_every_method(tmp_path: Path) -> None:
    """Drawn from the outcomes."""
    pytest.importorskip("matplotlib")
    methods.draw([outcome("grpo", 0.8, 0.9), outcome("gspo", 0.5)], tmp_path / "methods.svg")
    text = (tmp_path / "methods.svg").read_text(encoding="utf-8")
    assert "grpo" in text
    assert "gspo" in text
