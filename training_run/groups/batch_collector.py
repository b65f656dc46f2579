"""Collects the groups of one batch, with dynamic sampling: replacement of groups that cannot be trained on.

Batches in a row from which nothing can be learned are counted: a reward failed for every group, or all rewards were
equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isfinite

from clotho.settings.learner import EnvironmentReference, LearnerSection
from clotho.settings.objectives import EnvironmentAdvantage, PreferenceObjective
from protocols.errors import visible
from protocols.rollout import MAX_GROUP_REWARD, Discarded, DiscardReason, GroupOutcome, ScoredGroup, bounded


class BatchCollector:
    """Counts the groups of one batch and requests replacements for groups that cannot be trained on.

    DAPO (arXiv:2503.14476, section 3.2) samples until a batch has `size` groups with unequal rewards. Here at most
    `limit` groups are requested; the batch is then complete with fewer groups to train on. limit = size requests no
    replacement: a batch is `size` groups, trained on or discarded. limit = infinity waits for `size` groups to train
    on, as for environments, which send groups without a request.

    fresh, discarded: groups in the order of arrival. replaced: number of replacement groups requested.
    """

    def __init__(self, *, size: int, limit: float, rounds: bool) -> None:
        """rounds: request replacements only after all requested groups have ended."""
        self._size, self._limit, self._rounds = size, max(size, limit), rounds
        self.fresh: list[ScoredGroup] = []
        self.discarded: list[Discarded] = []
        self.replaced = 0
        self._taken_out = 0

    def add(self, outcome: GroupOutcome) -> None:
        """Add a group: discarded, or to be trained on."""
        if isinstance(outcome, Discarded):
            self.discarded.append(outcome)
        else:
            self.fresh.append(outcome)

    def request_replacements(self) -> int:
        """Return the number of replacement groups to request now, and count them as requested."""
        running = self.requested - self.ended
        if self._rounds and running:
            return 0
        missing = self._size - len(self.fresh) - running
        more = int(max(0, min(missing, self._limit - self.requested)))
        self.replaced += more
        return more

    def take_discarded(self) -> tuple[Discarded, ...]:
        """Remove and return the discarded groups so far; they still count as ended."""
        taken, self.discarded = tuple(self.discarded), []
        self._taken_out += len(taken)
        return taken

    @property
    def requested(self) -> int:
        """Number of groups requested for this batch."""
        return self._size + self.replaced

    @property
    def ended(self) -> int:
        """Number of groups that arrived."""
        return len(self.fresh) + len(self.discarded) + self._taken_out

    @property
    def complete(self) -> bool:
        """Whether the batch is complete; valid after `request_replacements`."""
        return self.ended >= self.requested

    @property
    def limited(self) -> bool:
        """Whether the batch is complete only because the limit of requested groups is reached."""
        return self.complete and self._limit > self._size > len(self.fresh)


def discard_unusable(outcome: GroupOutcome, *, version: int, settings: LearnerSection, oldest: int = 0) -> GroupOutcome:
    """Discard a group that a learner at policy version `version` cannot train on, or that is too stale.

    oldest: oldest allowed policy version, after a rollback.
    """
    if isinstance(outcome, Discarded):
        return outcome
    for reason, detail in _faults(outcome, version, settings, oldest):
        return outcome.discarded(reason, detail)
    return outcome


def _faults(
    scored: ScoredGroup, version: int, settings: LearnerSection, oldest: int
) -> Iterator[tuple[DiscardReason, str]]:
    completions = scored.completions
    if not any(completion.length for completion in completions):
        yield "invalid", "no completion has a token"
        return
    if not bounded(scored.rewards):
        yield "invalid", f"a reward is not finite, or beyond {MAX_GROUP_REWARD:g} in absolute size"
    yield from _lacking(scored, settings)
    if settings.objective.mask_truncated and all(c.finish_reason == "length" or not c.length for c in completions):
        yield (
            "zero_variance",
            "every completion was truncated, and learner.objective.mask_truncated excludes truncated completions",
        )
    sampled = scored.group.oldest_version
    if sampled < oldest:
        yield "stale", "sampled before a rollback"
    limit = settings.max_staleness
    if limit is not None and version - sampled > limit:
        yield "stale", f"{version - sampled} versions old, learner.max_staleness is {limit}"


def _lacking(scored: ScoredGroup, settings: LearnerSection) -> Iterator[tuple[DiscardReason, str]]:
    """Yield what the objective needs, and the group lacks."""
    if isinstance(settings.objective.advantage, EnvironmentAdvantage):
        if not scored.token_advantages:
            yield (
                "invalid",
                'the group has no token advantages, and learner.objective.advantage = "environment" needs them',
            )
        if not all(map(isfinite, chain.from_iterable(scored.token_advantages))):
            yield "invalid", "a token advantage is not finite"
    if isinstance(settings.objective, PreferenceObjective) and settings.objective.in_pairs and not _is_pair(scored):
        yield "invalid", "it is not one better and one worse completion with tokens, as its objective needs them"
    if isinstance(settings.reference, EnvironmentReference) and not scored.reference_logprobs:
        yield (
            "invalid",
            'the group has no reference log-probabilities, and learner.kl_penalty.reference = "environment" needs them',
        )


def _is_pair(scored: ScoredGroup) -> bool:
    """Whether a group has one better and one worse completion to compare, by its own advantages or by its rewards."""
    if not all(completion.length for completion in scored.completions) or any(scored.zero_advantage):
        return False
    sums = sorted(map(sum, scored.token_advantages)) if scored.token_advantages else [-1.0, 1.0]
    return sums[0] < 0 < sums[-1] and not any(sums[1:-1])


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
                f"a reward or environment failed for every group of {self._failed} batches in a row "
                f"(learner.max_failed_batches): {visible(example.detail, MAX_SHOWN)}"
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
