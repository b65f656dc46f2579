"""Components of the user's own that misbehave: a reward costs its groups, a stage costs the run, and both are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.running import BATCH, assert_recorded, lines, run
from tests.e2e.stages import ending

WAYWARD = """
extends = "local-m3"

[[rewards]]
name = "math_eval"
correct = true

[[rewards]]
name = "choice_correctness"
correct = true

[[rewards]]
name = "tests.e2e.stages:wayward"
timeout_seconds = 0.3
"""

BREAKING = """
extends = "local-m3"

[[actors]]
name = "breaking"
factory = "tests.e2e.stages:Breaking"
mode = "insert"
at = "{arrow}"
"""

DETAILS = {"raises": "wayward on purpose", "nan": "returned nan", "hangs": "took longer than 0.3 s"}


def test_a_reward_that_raises_hangs_or_returns_nan_costs_only_its_groups(tmp_path: Path) -> None:
    """The run ends well, the books balance, and each such group is discarded for exactly what happened to it."""
    (tmp_path / "wayward.toml").write_text(WAYWARD)
    steps = 6
    ended = run(tmp_path / "run", "--profile", str(tmp_path / "wayward.toml"), "--steps", str(steps))
    assert ended.status == 0, ended
    books = ended.books
    assert (books.prompted, books.carried_over) == (steps * BATCH, 0)
    assert_recorded(tmp_path / "run", books, steps=steps)
    groups = lines(tmp_path / "run" / "rollouts.jsonl")
    for group in groups:
        kind = ending(group["prompt"])
        if kind == "works":
            assert group["reason"] in (None, "zero_variance")
        else:
            assert group["reason"] == "reward_error"
            assert DETAILS[kind] in group["detail"]
    assert {ending(group["prompt"]) for group in groups} == {"works", *DETAILS}
    errors = sum(group["reason"] == "reward_error" for group in groups)
    assert f"reward_error {errors}" in ended.out


@pytest.mark.parametrize("arrow", ["rollouts", "scored"])
def test_a_stage_that_fails_ends_the_run_with_its_name(tmp_path: Path, arrow: str) -> None:
    """Exit status 1, its traceback, and one last line that names it, not those who missed it."""
    (tmp_path / "breaking.toml").write_text(BREAKING.format(arrow=arrow))
    ended = run(tmp_path / "run", "--profile", str(tmp_path / "breaking.toml"), "--steps", "4")
    assert ended.status == 1
    assert "clotho: actor 'breaking' failed: LookupError: broken on purpose" in ended.err.splitlines()
    assert 'raise LookupError("broken on purpose")' in ended.err
