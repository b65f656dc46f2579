from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clotho.rewards.registry import BUILT_IN, is_async, load_reward
from protocols.errors import ProfileError
from tests.rewards import sample_rewards
from tests.rewards.groups import answered, problem

HERE = "tests.rewards.sample_rewards"


def test_every_built_in_reward_is_found_by_name() -> None:
    """And judges the same right answer as 1."""
    assert set(BUILT_IN) == {"format", "math_eval", "jaccard", "choice_correctness", "exact"}
    for name in BUILT_IN:
        answer = "B" if name == "choice_correctness" else "42"
        assert load_reward(name)(problem(answer), answered(answer)) == 1.0


def test_a_function_of_the_user_is_found_by_module_and_name() -> None:
    """Synchronous, asynchronous, or an object with a call of its own."""
    assert load_reward(f"{HERE}:length") is sample_rewards.length
    assert not is_async(load_reward(f"{HERE}:length"))
    assert all(is_async(load_reward(f"{HERE}:{name}")) for name in ("async_length", "compute_advantages"))


def test_modules_in_the_current_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever directory the program itself lies in."""
    (tmp_path / "rewards_of_mine.py").write_text("def one(problem, completion):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("rewards_of_mine:one")(problem(), "") == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math_evla", "did you mean 'math_eval'"),
        ("Format", "did you mean 'format'"),
        ("zzz", "allowed are format, math_eval, jaccard, choice_correctness, exact, or module:function"),
        ("", "allowed are"),
        (":length", "malformed"),
        (f"{HERE}:", "malformed"),
        (f"{HERE}:a.b", "malformed"),
        (f"{HERE}:lenght", "did you mean 'length'"),
        (f"{HERE}:not_a_function", "is a int, not a function"),
        (f"{HERE}:one_argument", "cannot be called with"),
        ("no_such_module_anywhere:f", "cannot be imported: ModuleNotFoundError"),
        ("tests.rewards.broken_rewards:f", "cannot be imported: RuntimeError: broken at import"),
        (".relative:f", "cannot be imported: TypeError"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_refused_with_the_reason(name: str, message: str) -> None:
    """The error names the profile's key, what failed, and the nearest valid name."""
    with pytest.raises(ProfileError, match=r"^rewards\.name") as caught:
        load_reward(name)
    assert message in str(caught.value)
