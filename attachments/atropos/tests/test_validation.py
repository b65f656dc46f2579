"""Validation of every field of a group, and of its teacher."""

from __future__ import annotations

from typing import Any

import pytest

from attachments.atropos.tests.environment_groups import PROMPT, ReaderHarness, group, raw, sequence


@pytest.mark.parametrize(
    ("change", "position"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [[5]] * 2}, "tokens[0]"),
        ({"tokens": [[5] * 65] * 2}, "tokens[0]"),
        ({"tokens": [[5, 9, 33, 97]] * 2}, "tokens[0][3]"),
        ({"tokens": [[5, 9, 33, -1]] * 2}, "tokens[0][3]"),
        ({"tokens": [[5, 9, 33, 10**30]] * 2}, "tokens[0][3]"),
        ({"masks": [[-100] * 3 + [40]]}, "masks"),
        ({"masks": [[-100] * 3, [-100] * 4]}, "masks[0]"),
        ({"masks": [[0, 0, 0, 1], [0, 0, 0, 1]]}, "masks[0][0]"),
        ({"scores": [1.0]}, "scores"),
        ({"scores": [0.0, 1e30]}, "scores[1]"),
        ({"scores": [0.0, None]}, "scores[1]"),
        ({"advantages": [[0.0] * 4]}, "advantages"),
        ({"advantages": [[0.0] * 3, [0.0] * 4]}, "advantages[0]"),
        ({"advantages": [[0.0] * 4, [0, 0, 0, 1e30]]}, "advantages[1][3]"),
        ({"inference_logprobs": [[1.0] * 4] * 2}, "inference_logprobs[0][3]"),
        ({"inference_logprobs": [[1, 1, 1, 0.5]] * 2}, "inference_logprobs[0][3]"),
        ({"inference_logprobs": [[1, 1, 1, -1e300]] * 2}, "inference_logprobs[0][3]"),
        ({"inference_logprobs": [[1, 1, 1]] * 2}, "inference_logprobs[0]"),
        ({"ref_logprobs": [[1, 1, 1, 1]] * 2}, "ref_logprobs[0][3]"),
        ({"overrides": [{}]}, "overrides"),
        ({"overrides": [{"temperature": 0}, {}]}, "overrides[0].temperature"),
        ({"overrides": [{"set_advantage_to_zero": 1}, {}]}, "overrides[0].set_advantage_to_zero"),
        ({"generation_params": {"temperature": "hot"}}, "generation_params.temperature"),
        ({"images": ["iVBORw0KGgo"]}, "images"),
        ({"images": {"0": "x" * 5000}}, "images"),
    ],
)
async def test_an_invalid_field_is_rejected_with_its_position(change: dict[str, Any], position: str) -> None:
    """The detail starts with the field and the indices of the invalid value."""
    detail = await ReaderHarness().discarded(group((40,), (41,)) | change)
    assert detail.partition(": ")[0] == position


@pytest.mark.parametrize("images", [None, [], [None, None], [[], []], {}])
async def test_empty_images_are_accepted(images: Any) -> None:
    """All ways to write that there is no image."""
    await ReaderHarness().scored(group((40,), (41,), images=images, messages=[[{"role": "user", "content": "?"}]] * 2))


async def test_the_first_and_the_last_token_of_the_vocabulary_are_valid() -> None:
    """The vocabulary of the tests has 97 tokens."""
    scored = await ReaderHarness().scored(group((0,), (96,)))
    assert [completion.tokens for completion in scored.group.completions] == [(0,), (96,)]


async def test_a_group_has_at_most_1024_sequences() -> None:
    """The limit bounds the cost of a group."""
    one = sequence(PROMPT, (40,))
    fields = {"tokens": [one[0]] * 1024, "masks": [one[1]] * 1024, "scores": [0.0] * 1023 + [1.0]}
    fields |= {"inference_logprobs": [one[2]] * 1024}
    assert len((await ReaderHarness().scored(raw(fields))).rewards) == 1024
    assert "1025 sequences" in await ReaderHarness().discarded({"tokens": [one[0]] * 1025, "masks": [], "scores": []})


USES: dict[str, Any] = {"distillation_weight": 0.5}


def group_with_teacher(ids: Any, logprobs: Any) -> dict[str, Any]:
    """Return a group with two trained tokens in the first sequence and one in the second, with their teacher rows."""
    return group(
        (40, 41),
        (42,),
        distill_token_ids=[[[], [], [1], ids[0], ids[1]], [[], [], [], ids[2]]],
        distill_logprobs=[[[], [], [], logprobs[0], logprobs[1]], [[], [], [], logprobs[2]]],
    )


async def test_the_teacher_is_kept_if_the_learner_uses_it() -> None:
    """Rows of tokens that were not sampled are ignored."""
    fields = group_with_teacher([[1, 2], [3, 4], [5, 6]], [[-1, -2], [-3, -4], [-5, -6]])
    one, other = (await ReaderHarness(**USES).scored(fields)).teacher
    assert (one.tokens, one.logprobs) == (((1, 2), (3, 4)), ((-1.0, -2.0), (-3.0, -4.0)))
    assert (other.tokens, other.logprobs) == (((5, 6),), ((-5.0, -6.0),))
    assert (await ReaderHarness().scored(fields)).teacher == ()
    assert (
        await ReaderHarness(**USES).scored(group((40,), (41,), distill_token_ids=[], distill_logprobs=None))
    ).teacher == ()


async def test_longer_teacher_rows_keep_the_most_probable_tokens() -> None:
    """Servers add the sampled token to a row if it is not among the best."""
    fields = group_with_teacher([[9, 1, 2], [3, 4], [5, 6]], [[-8, -1, -2], [-3, -4], [-5, 0.0005]])
    one, other = (await ReaderHarness(**USES).scored(fields)).teacher
    assert (one.tokens, other.tokens) == (((1, 2), (3, 4)), ((6, 5),))
    assert other.logprobs == ((0.0, -5.0),)


async def test_a_zero_variance_group_with_a_teacher_is_kept() -> None:
    """The teacher provides a training signal."""
    fields = group_with_teacher([[1], [2], [3]], [[-1], [-1], [-1]]) | {"scores": [1, 1]}
    assert (await ReaderHarness(**USES).scored(fields)).rewards == (1.0, 1.0)


@pytest.mark.parametrize(
    ("ids", "logprobs", "position"),
    [
        ([[], [3], [4]], [[], [-1], [-1]], "distill_token_ids[0][3]"),
        ([[1] * 257, [3], [4]], [[-1], [-1], [-1]], "distill_token_ids[0][3]"),
        ([[1], [3, 4], [4]], [[-1], [-1], [-1]], "distill_logprobs[0][4]"),
        ([[1], [3], [97]], [[-1], [-1], [-1]], "distill_token_ids[1][3]"),
        ([[1, 1], [3], [4]], [[-1, -2], [-1], [-1]], "distill_token_ids[0][3]"),
        ([[1], [3], [4]], [[-1], [1.0], [-1]], "distill_logprobs[0][4]"),
        ([[1], [3], ["4"]], [[-1], [-1], [-1]], "distill_token_ids[1][3][0]"),
    ],
)
async def test_an_invalid_teacher_is_rejected_with_its_position(ids: Any, logprobs: Any, position: str) -> None:
    """The group is discarded if the learner uses the teacher."""
    detail = await ReaderHarness(**USES).discarded(group_with_teacher(ids, logprobs))
    assert detail.partition(": ")[0] == position


async def test_the_teacher_needs_tokens_and_log_probabilities() -> None:
    """Both fields, with one row per sequence."""
    fields = group_with_teacher([[1], [2], [3]], [[-1], [-1], [-1]]) | {"distill_logprobs": None}
    assert await ReaderHarness(**USES).discarded(fields) == "distill_token_ids and distill_logprobs: set both or none"
    fields = group((40,), (41,), distill_token_ids=[[[1]] * 4], distill_logprobs=[[[-1.0]] * 4])
    assert await ReaderHarness(**USES).discarded(fields) == "distill_token_ids: 1 rows for 2 sequences"
