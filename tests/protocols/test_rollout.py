"""What belongs to a group fits its completions, or there is no such group."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup, TeacherTokens
from protocols.sampling import Completion

ONE = TeacherTokens(tokens=((1,), (2,)), logprobs=((-1.0,), (-2.0,)))
EVERY_TOKEN, ANY_TEACHER = ("token_advantages", "reference_logprobs"), ("teacher_logprobs", "teacher_weights")
SHORT = TeacherTokens(tokens=((1,),), logprobs=((-1.0,), (-2.0,)))


def completion() -> Completion:
    """Of two tokens."""
    return Completion(tokens=(4, 5), logprobs=(-1.0, -2.0), versions=(0, 0), text="", finish_reason="stop")


def scored(**fields: Any) -> ScoredGroup:
    """A group of two completions."""
    prompt = Prompt(group_id=0, problem=Problem(prompt="", answer="", type=""), tokens=(3,), seed=0)
    group = RolloutGroup(prompt=prompt, completions=(completion(), completion()))
    return ScoredGroup(group=group, parts={}, **({"rewards": (0.0, 1.0)} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"rewards": (1.0,)},
        {"temperatures": (1.0,)},
        {"zero_advantage": (True, False, True)},
        {"teacher": (ONE,)},
        {"teacher": (ONE, SHORT)},
        {"correct": (True,)},
        *({name: rows} for name in EVERY_TOKEN for rows in (((1.0, 2.0), (1.0,)), ((1.0, 2.0), ()), ((1.0, 2.0),))),
        *({name: rows} for name in ANY_TEACHER for rows in (((1.0, 2.0), (1.0,)), ((1.0, 2.0),))),
        *({"temperatures": (1.0, temperature)} for temperature in (0.0, 1e-39, -1.0, math.nan, math.inf)),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any]) -> None:
    """One entry for each completion, one number for each token; a temperature that tokens can be sampled at."""
    with pytest.raises(ValueError, match=r"for 2 completions|one entry|one number|above 0"):
        scored(**fields)


def test_what_fits_is_taken() -> None:
    """All of it at once, a completion without a teacher too; and nothing of it is needed."""
    rows = ((1.0, 2.0), (3.0, 4.0))
    scored(
        temperatures=(0.5, 2.0),
        zero_advantage=(True, False),
        correct=(True, None),
        teacher=(ONE, TeacherTokens(tokens=(), logprobs=())),
        **dict.fromkeys(EVERY_TOKEN, rows),
        **dict.fromkeys(ANY_TEACHER, ((1.0, 2.0), ())),
    )
    assert scored().temperatures == ()


@pytest.mark.parametrize("sampled", [(True,), (True, False, True)])
def test_a_completion_says_of_every_token_whether_it_was_drawn(sampled: tuple[bool, ...]) -> None:
    """Or of none: then all were."""
    with pytest.raises(ValueError, match="sampled"):
        Completion(tokens=(4, 5), logprobs=(-1.0, 0.0), versions=(0, 0), text="", finish_reason="stop", sampled=sampled)
    assert completion().length == 2
