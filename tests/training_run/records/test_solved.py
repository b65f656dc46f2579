"""Which completions of a group solved its problem."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.training_run.records.display_examples import discarded
from training_run.records.solved import Solved, solved_by

Parts = dict[str, tuple[float | None, ...]]


@pytest.mark.parametrize(
    ("correct", "parts", "rewards", "expected"),
    [
        ((True, True), {"format": (0.0, 1.0)}, (1.0, 2.0), "all"),
        ((False, False), {"format": (0.0, 1.0)}, (0.0, 1.0), "none"),
        ((True, False), {"own": (1.0, 0.0)}, (1.0, 1.0), "mixed"),
        ((True, None), {"own": (None, 0.0)}, (1.0, 0.0), "mixed"),
        ((), {"a": (1.0, 1.0), "overlong": (-0.5, 0.0)}, (0.5, 1.0), "all"),
        ((), {"a": (1.0, 1.0), "b": (0.0, 0.0)}, (1.0, 1.0), "mixed"),
        ((), {"a": (-1.0, 0.0)}, (-1.0, 0.0), "none"),
        ((), {"a": (0.5, 0.5)}, (0.5, 0.5), "mixed"),
        ((), {}, (1.0, 1.0), "all"),
        ((), {}, (-1.0, -1.0), "none"),
        ((), {}, (), None),
        ((None, None), {}, (0.0, 0.0), None),
        ((), {}, (float("nan"), 0.0), None),
    ],
)
def test_a_group_is_solved_by_all_by_none_or_by_some(
    correct: tuple[bool | None, ...], parts: Parts, rewards: tuple[float, ...], expected: Solved | None
) -> None:
    """Rewards with `correct = true` decide; without them, values of at least 1 and of at most 0 without the penalty."""
    assert solved_by(replace(discarded(), correct=correct, parts=parts, rewards=rewards)) == expected
