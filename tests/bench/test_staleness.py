"""`python -m bench staleness`: valid profiles, runs that are not repeated, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from bench import staleness
from bench.fingerprint import fingerprint
from bench.staleness import METHODS, StalenessRun, arguments, table
from clotho.config.flags import parse_arguments
from clotho.config.load import load_profile
from clotho.config.objectives import OptimalBaselineAdvantage, Reinforce
from clotho.config.sections_training import EssStepScale

RUN = StalenessRun(
    profile="local-m3", method="vcpo", lag=32, seed=0, flags="", before=0.5, after=0.9, lowest=0.4, updates=60,
    staleness=32, ess=0.5, completion_ess=0.25, step_scale=0.5, seconds=30.0, command="", fingerprint=fingerprint(),
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lag", [0, 32])
def test_every_method_is_a_valid_profile_with_its_lag(method: str, lag: int) -> None:
    """Synchronous, so that the age of a batch is the lag."""
    parsed = parse_arguments(arguments("local-m3", method, lag, 3, "--steps 9"))
    profile = load_profile(parsed.profile, parsed.overrides)
    assert (profile.asynchronous, profile.rollouts.lag, profile.seed, profile.steps) == (False, lag, 3, 9)
    objective = profile.learner.objective
    if method == "vcpo":
        assert isinstance(objective, Reinforce)
        assert isinstance(objective.advantage, OptimalBaselineAdvantage)
        assert isinstance(profile.learner.step_scale, EssStepScale)


def test_a_run_with_results_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted benchmark continues with the first run that is missing; other flags are other runs."""
    measured: list[tuple[int, int, str]] = []

    def measure(profile: str, method: str, lag: int, seed: int, flags: str) -> StalenessRun:
        measured.append((lag, seed, flags))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return replace(RUN, profile=profile, method=method, lag=lag, seed=seed, flags=flags)

    monkeypatch.setattr(staleness, "measure", measure)
    words = ["--out", str(tmp_path / "out.jsonl"), "--methods", "vcpo", "--lags", "0", "4", "--seeds", "0", "1"]
    with pytest.raises(KeyboardInterrupt):
        staleness.main(words)
    assert staleness.main(words) == 0
    assert measured == [(0, 0, ""), (4, 0, ""), (4, 0, ""), (0, 1, ""), (4, 1, "")]
    assert len(staleness.read(tmp_path / "out.jsonl")) == 4
    staleness.main([*words[:-1], "--", "--steps", "9"])
    assert measured[-2:] == [(0, 0, "--steps 9"), (4, 0, "--steps 9")]


def test_the_table_has_a_row_per_method_and_a_column_per_lag() -> None:
    """Median, range and effective sample size of the seeds; empty cells where nothing was measured."""
    runs = [
        RUN,
        replace(RUN, seed=1, after=0.8, completion_ess=0.35),
        replace(RUN, lag=0, method="grpo", after=0.95, completion_ess=1.0),
    ]
    heading, rule, *rows = [line for line in table(runs).splitlines() if line.startswith("|")]
    assert heading == "| `local-m3`, 0.500 before | lag 0 | lag 32 |"
    assert set(rule) == set("|-:")
    assert rows == ["| `grpo` | 0.950<br>1.00 |  |", "| `vcpo` |  | 0.850 (0.800 to 0.900)<br>0.30 |"]
