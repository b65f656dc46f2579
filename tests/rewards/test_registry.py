"""Registry of reward functions: built-in names and imports from user code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clotho.rewards.registry import (
    RewardFunction,
    RewardOptions,
    built_in,
    group_parameters,
    is_async,
    load_reward,
)
from protocols.errors import ProfileError
from tests.rewards import sample_rewards
from tests.rewards.groups import answered, problem

HERE = "tests.rewards.sample_rewards"

FILE = """
CALLS = []

def one(problem, completion):
    CALLS.append(completion)
    return 1.0

def count(problem, completion):
    return len(CALLS)
"""


def test_every_built_in_reward_is_loaded_by_name() -> None:
    """Each of them gives a correct answer the reward 1. Those that need a library or settings run in processes."""
    functions = {name: one.function for name, one in built_in().items() if one.function is not None}
    in_threads = {name for name, function in functions.items() if group_parameters(function) is None}
    assert in_threads == {"format", "math_eval", "jaccard", "choice_correctness", "exact"}
    for name in in_threads:
        answer = {"choice_correctness": "B", "jaccard": "Paris"}.get(name, "42")
        assert load_reward(name)(problem(answer), answered(answer)) == 1.0


def test_the_answer_is_found_where_the_options_say() -> None:
    """In every function that reads an answer."""
    boxed = RewardOptions(answer_in="boxed")
    assert load_reward("math_eval", boxed)(problem("42"), r"\boxed{42}") == 1.0
    assert load_reward("math_eval", boxed)(problem("42"), answered("42")) == 0.0


@pytest.mark.parametrize(
    ("function", "required"),
    [
        (lambda completions: [], ("completions",)),
        (lambda prompts, completions, **kwargs: [], ("prompts", "completions")),
        (lambda completions, solution, scale=2.0, **columns: [], ("completions", "solution")),
        (lambda *, completion_ids, **kwargs: [], ("completion_ids",)),
        (lambda **kwargs: [], ()),
        (lambda problem, completion: 0.0, None),
        (lambda problem, completion, **kwargs: 0.0, None),
        (lambda *arguments: 0.0, None),
        (min, None),
    ],
)
def test_a_function_of_a_group_is_recognized_by_its_parameters(
    function: RewardFunction, required: tuple[str, ...] | None
) -> None:
    """As GRPOTrainer of TRL calls it: by keyword, with lists."""
    found = group_parameters(function)
    assert (found.required if found else None) == required


def test_a_user_function_is_loaded_by_module_and_name() -> None:
    """Synchronous, asynchronous, or an object with `__call__`."""
    assert load_reward(f"{HERE}:length") is sample_rewards.length
    assert not is_async(load_reward(f"{HERE}:length"))
    assert all(is_async(load_reward(f"{HERE}:{name}")) for name in ("async_length", "judge"))


def test_a_module_in_the_current_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the program does not matter."""
    (tmp_path / "rewards_of_mine.py").write_text("def one(problem, completion):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("rewards_of_mine:one")(problem(), "") == 1.0


def test_a_file_path_names_a_reward_module(tmp_path: Path) -> None:
    """Two functions of one file come from one import."""
    file = tmp_path / "my rewards.py"
    file.write_text(FILE)
    assert load_reward(f"{file}:one")(problem(), "") == 1.0
    assert load_reward(f"{file}:count")(problem(), "") == 1


@pytest.mark.parametrize("content", [None, "def one(problem, completion:\n", "raise RuntimeError\n"])
def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, content: str | None) -> None:
    """Missing, malformed, or raising at import."""
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ProfileError, match=r"cannot import"):
        load_reward(f"{file}:one")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math_evla", "did you mean math_eval"),
        ("Format", "did you mean format"),
        ("zzz", ", module:function, or path/to/file.py:function"),
        ("", "use format"),
        (":length", "malformed"),
        (f"{HERE}:", "malformed"),
        (f"{HERE}:a.b", "malformed"),
        (f"{HERE}:lenght", "did you mean length"),
        (f"{HERE}:not_a_function", "not a function but a value of type int"),
        (f"{HERE}:one_argument", "accepts neither (problem, completion) nor a list"),
        ("no_such_module_anywhere:f", "ModuleNotFoundError"),
        ("tests.rewards.broken_rewards:f", "RuntimeError: broken at import"),
        (".relative:f", "TypeError"),
    ],
)
def test_a_name_that_cannot_be_loaded_raises_profile_error(name: str, message: str) -> None:
    """The message starts with the key, and contains the reason and the nearest valid name."""
    with pytest.raises(ProfileError, match=r"^rewards\.name") as caught:
        load_reward(name)
    assert message in str(caught.value)
