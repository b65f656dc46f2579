"""The shape of a group, field by field: what does not fit is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.atropos.groups import PROMPT, Scene, group, raw, sequence


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"tokens": []}, "tokens: 0 sequences; 1 to 1024 are possible"),
        ({"tokens": [[5]] * 2}, "tokens[0]: 1 tokens; the policy reads 2 to 64"),
        ({"tokens": [[5] * 65] * 2}, "tokens[0]: 65 tokens; the policy reads 2 to 64"),
        ({"tokens": [[5, 9, 33, 97]] * 2}, "tokens[0][3]: 97 is not a token; they are below 97"),
        ({"tokens": [[5, 9, 33, -1]] * 2}, "tokens[0][3]: -1 is not a token; they are below 97"),
        ({"tokens": [[5, 9, 33, 10**30]] * 2}, "tokens[0][3]: Expected `int` <= 2147483647"),
        ({"masks": [[-100] * 3 + [40]]}, "masks: 1 rows for 2 sequences"),
        ({"masks": [[-100] * 3, [-100] * 4]}, "masks[0]: 3 entries for 4 tokens"),
        (
            {"masks": [[0, 0, 0, 1], [0, 0, 0, 1]]},
            "masks[0][0]: 0 is neither -100 nor the token 5 (labels, not 0/1)",
        ),
        ({"scores": [0.0, 1e30]}, "scores[1]: 1e+30 is beyond 1e+09"),
        ({"scores": [0.0, None]}, "scores[1]: Expected `float`, got `null`"),
        ({"advantages": [[0.0] * 4]}, "advantages: 1 rows for 2 sequences"),
        ({"advantages": [[0.0] * 3, [0.0] * 4]}, "advantages[0]: 3 entries for 4 tokens"),
        ({"advantages": [[0.0] * 4, [0, 0, 0, 1e30]]}, "advantages[1][3]: 1e+30 is not between -1e+09 and 1e+09"),
        (
            {"inference_logprobs": [[1.0] * 4] * 2},
            "inference_logprobs[0][3]: 1.0 marks a masked token, and masks[0][3] trains it",
        ),
        ({"inference_logprobs": [[1, 1, 1, 0.5]] * 2}, "inference_logprobs[0][3]: 0.5 is not between -9999 and 0.001"),
        (
            {"inference_logprobs": [[1, 1, 1, -1e300]] * 2},
            "inference_logprobs[0][3]: -1e+300 is not between -9999 and 0.001",
        ),
        ({"inference_logprobs": [[1, 1, 1]] * 2}, "inference_logprobs[0]: 3 entries for 4 tokens"),
        (
            {"ref_logprobs": [[1, 1, 1, 1]] * 2},
            "ref_logprobs[0][3]: 1.0 marks a masked token, and masks[0][3] trains it",
        ),
        ({"overrides": [{}]}, "overrides: 1 for 2 sequences"),
        ({"overrides": [{"temperature": 0}, {}]}, "overrides[0].temperature: 0; 0.001 to 100 are possible"),
        (
            {"overrides": [{"set_advantage_to_zero": 1}, {}]},
            "overrides[0].set_advantage_to_zero: Expected `bool | null`, got `int`",
        ),
        (
            {"generation_params": {"temperature": "hot"}},
            "generation_params.temperature: Expected `float | null`, got `str`",
        ),
        ({"images": ["iVBORw0KGgo"]}, "images: the policy reads text only"),
        ({"images": {"0": "x" * 5000}}, "images: the policy reads text only"),
    ],
)
async def test_a_refusal_names_field_and_index(change: dict[str, Any], detail: str) -> None:
    """One short line of visible characters, for every way to get a field wrong."""
    assert await Scene().refused(group((40,), (41,)) | change) == detail


@pytest.mark.parametrize("images", [None, [], [None, None], [[], []], {}])
async def test_no_images_are_no_obstacle(images: Any) -> None:
    """However their absence is written."""
    await Scene().scored(group((40,), (41,), images=images, messages=[[{"role": "user", "content": "?"}]] * 2))


async def test_groups_of_a_thousand_sequences_and_no_more() -> None:
    """A bound on what one group may ask of the learner."""
    one = sequence(PROMPT, (40,))
    fields = {"tokens": [one[0]] * 1024, "masks": [one[1]] * 1024, "scores": [0.0] * 1023 + [1.0]}
    fields |= {"inference_logprobs": [one[2]] * 1024}
    assert len((await Scene().scored(raw(fields))).rewards) == 1024
    assert "1025 sequences" in await Scene().refused({"tokens": [one[0]] * 1025, "masks": [], "scores": []})
