"""`python -m bench staleness`: valid profiles, and the table."""

from __future__ import annotations

import pytest

from bench.fingerprint import fingerprint
from bench.staleness import FLAGS, METHODS, table
from bench.trials import Method, Outcome, Point, Trial, merged
from clotho.config.flags import parse_arguments
from clotho.config.load import load_profile
from clotho.config.objectives import OptimalBaselineAdvantage, Reinforce
from clotho.config.sections_training import EssStepScale


@pytest.mark.parametrize("method", [one for one in METHODS if one.name.endswith(("lag 0", "lag 32"))], ids=str)
def test_every_method_is_a_valid_profile_with_its_lag(method: Method) -> None:
    """Synchronous, so that the age of a batch is the lag."""
    parsed = parse_arguments(merged("--profile learn-m3 --async false", method.flags))
    profile = load_profile(parsed.profile, parsed.overrides)
    assert (profile.asynchronous, profile.rollouts.lag) == (False, int(method.name.rpartition(" ")[2]))
    objective = profile.learner.objective
    assert isinstance(objective.advantage, OptimalBaselineAdvantage) == (ADVANTAGE in method.flags)
    if method.family == "vcpo":
        assert isinstance(objective, Reinforce)
        assert isinstance(profile.learner.step_scale, EssStepScale)


ADVANTAGE = "optimal_baseline"


def outcome(name: str, *accuracies: float) -> Outcome:
    """A method whose seeds ended at these accuracies."""
    (method,) = (one for one in METHODS if one.name == name)
    trials = [
        Trial(
            method=name, flags=method.flags, seed=seed, curve=(Point(0, 0.0, 0, 0.25), Point(9, 1.0, 9, accuracy)),
            updates=9, rollouts=9, tokens=9, seconds=1.0, elapsed=2.0, cpu_seconds=2.0, peak_bytes=1, status=0,
            side_by_side=1, sources="", command="", fingerprint=fingerprint(),
        )
        for seed, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    return Outcome(method=method, trials=tuple(trials))


def test_the_table_has_a_row_per_method_and_a_column_per_lag() -> None:
    """Median and range of the seeds; empty cells where nothing was measured."""
    found = [outcome("grpo, lag 0", 0.95), outcome("vcpo, lag 32", 0.9, 0.8, 0.7), outcome("grpo, lag 32", 0.5)]
    heading, rule, *rows = [line for line in table(found).splitlines() if line.startswith("|")]
    assert heading == "| method | lag 0 | lag 32 |"
    assert set(rule) == set("|-:")
    assert rows == ["| `grpo` | 0.950 | 0.500 |", "| `vcpo` |  | 0.800 (0.700 to 0.900) |"]
    assert len(METHODS) == 5 * len(FLAGS)
