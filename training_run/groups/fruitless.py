"""Batches in a row from which nothing can be learned: a reward failed for every group, or all rewards were equal."""

from __future__ import annotations

from collections.abc import Sequence

from protocols.errors import visible
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup

MAX_SHOWN = 200
"""Characters of an error or a completion that a cause shows."""


class FruitlessBatches:
    """Counts batches in a row without a group to train on, in which every group ended for one of two reasons.

    A batch with other groups ends the series. The counts begin anew when a run is resumed.
    """

    def __init__(self, *, max_failed: int, max_equal: int, batch_size: int) -> None:
        """max_failed, max_equal: limits of `learner.max_failed_batches` and `learner.max_equal_batches`; 0: none."""
        self._max_failed, self._max_equal, self._batch_size = max_failed, max_equal, batch_size
        self._failed = self._equal = 0
        self._since: list[Discarded] = []

    def add(self, groups: Sequence[GroupOutcome]) -> str:
        """Count a batch. Returns the cause for which the run must end; empty if there is none."""
        discarded = [group for group in groups if isinstance(group, Discarded)]
        reasons = {group.reason for group in discarded}
        if not groups or len(discarded) < len(groups) or not reasons <= {"reward_error", "zero_variance"}:
            self._failed = self._equal = 0
            return ""
        self._failed = self._failed + 1 if reasons == {"reward_error"} else 0
        self._equal = self._equal + 1 if "zero_variance" in reasons else 0
        example = next((group for group in discarded if group.reason == "zero_variance"), discarded[0])
        if self._failed == self._max_failed > 0:
            return (
                f"a reward failed for every group of {self._failed} batches in a row (learner.max_failed_batches): "
                f"{visible(example.detail, MAX_SHOWN)}"
            )
        if self._equal == self._max_equal > 0:
            return (
                f"all rewards of each group were equal in {self._equal} batches in a row (learner.max_equal_batches), "
                f"so nothing was learned{_shown(example)}"
            )
        return ""

    def add_one(self, group: GroupOutcome) -> str:
        """Count a group of a run whose batches have only groups to train on: `batch_size` others are a batch."""
        if isinstance(group, ScoredGroup):
            self._since = []
            return self.add([group])
        self._since.append(group)
        if len(self._since) < self._batch_size:
            return ""
        groups, self._since = self._since, []
        return self.add(groups)


def _shown(group: Discarded) -> str:
    if not group.completions or not group.rewards:
        return ""
    text = visible(f"{group.prompt.problem.prompt} -> {group.completions[0].text}", MAX_SHOWN, keep_end=80)
    return f"; for example, the reward {group.rewards[0]:g} for {text}"
