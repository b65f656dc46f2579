"""The teacher of a group: as many alternatives at every trained token, the most probable ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.atropos.groups import Scene, group

USES: dict[str, Any] = {"distillation_weight": 0.5}


def taught(ids: Any, logprobs: Any) -> dict[str, Any]:
    """A group whose first sequence has two trained tokens, the second one; teacher rows of the trained tokens."""
    return group(
        (40, 41),
        (42,),
        distill_token_ids=[[[], [], [1], ids[0], ids[1]], [[], [], [], ids[2]]],
        distill_logprobs=[[[], [], [], logprobs[0], logprobs[1]], [[], [], [], logprobs[2]]],
    )


async def test_a_teacher_is_kept_where_it_is_used() -> None:
    """Rows of tokens that nobody drew are not looked at."""
    fields = taught([[1, 2], [3, 4], [5, 6]], [[-1, -2], [-3, -4], [-5, -6]])
    one, other = (await Scene(**USES).scored(fields)).teacher
    assert (one.tokens, one.logprobs) == (((1, 2), (3, 4)), ((-1.0, -2.0), (-3.0, -4.0)))
    assert (other.tokens, other.logprobs) == (((5, 6),), ((-5.0, -6.0),))
    assert (await Scene().scored(fields)).teacher == ()
    assert (await Scene(**USES).scored(group((40,), (41,), distill_token_ids=[], distill_logprobs=None))).teacher == ()


async def test_the_least_probable_are_left_out_where_rows_differ() -> None:
    """Servers report the token that stands there besides the best, where it is not among them."""
    fields = taught([[9, 1, 2], [3, 4], [5, 6]], [[-8, -1, -2], [-3, -4], [-5, 0.0005]])
    one, other = (await Scene(**USES).scored(fields)).teacher
    assert (one.tokens, other.tokens) == (((1, 2), (3, 4)), ((6, 5),))
    assert other.logprobs == ((0.0, -5.0),)


async def test_equal_rewards_still_teach_what_the_teacher_says() -> None:
    """The group is not one without signal."""
    fields = taught([[1], [2], [3]], [[-1], [-1], [-1]]) | {"scores": [1, 1]}
    assert (await Scene(**USES).scored(fields)).rewards == (1.0, 1.0)


@pytest.mark.parametrize(
    ("ids", "logprobs", "detail"),
    [
        ([[], [3], [4]], [[], [-1], [-1]], "distill_token_ids[0][3]: 0 tokens; 1 to 256 are possible"),
        ([[1] * 257, [3], [4]], [[-1], [-1], [-1]], "distill_token_ids[0][3]: 257 tokens; 1 to 256 are possible"),
        ([[1], [3, 4], [4]], [[-1], [-1], [-1]], "distill_logprobs[0][4]: 1 numbers for 2 tokens"),
        ([[1], [3], [97]], [[-1], [-1], [-1]], "distill_token_ids[1][3]: not all are tokens; they are below 97"),
        ([[1, 1], [3], [4]], [[-1, -2], [-1], [-1]], "distill_token_ids[0][3]: a token stands there twice"),
        ([[1], [3], [4]], [[-1], [1.0], [-1]], "distill_logprobs[0][4]: not all are between -9999 and 0.001"),
        ([[1], [3], ["4"]], [[-1], [-1], [-1]], "distill_token_ids[1][3][0]: Expected `int`, got `str`"),
    ],
)
async def test_a_teacher_that_makes_no_sense(ids: Any, logprobs: Any, detail: str) -> None:
    """The group is refused where the teacher would have been learned from."""
    assert await Scene(**USES).refused(taught(ids, logprobs)) == detail


async def test_half_a_teacher_is_none() -> None:
    """Tokens and log-probabilities come together."""
    fields = taught([[1], [2], [3]], [[-1], [-1], [-1]]) | {"distill_logprobs": None}
    assert await Scene(**USES).refused(fields) == "distill_token_ids and distill_logprobs: one is missing"
    fields = group((40,), (41,), distill_token_ids=[[[1]] * 4], distill_logprobs=[[[-1.0]] * 4])
    assert await Scene(**USES).refused(fields) == "distill_token_ids: 1 rows for 2 sequences"
