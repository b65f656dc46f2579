"""Dynamic sampling: a batch while its groups come in, and how many more must be asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import isfinite

from clotho.config.objectives import EnvironmentAdvantage
from clotho.config.schema import LearnerSection
from clotho.config.sections_training import EnvironmentReference
from protocols.rollout import Discarded, DiscardReason, GroupOutcome, ScoredGroup


class FormingBatch:
    """Counts how the groups of one batch ended, and asks for others in place of those that cannot be learned from.

    DAPO (arXiv:2503.14476, section 3.2) samples on until a batch has `size` groups that teach something; here at most
    `limit` groups are asked for it, and beyond that it is taken as it stands. limit = size never asks again: a batch
    is then `size` groups, however they end; limit = infinity waits for as many as it takes, as for environments, which
    send what they like.

    fresh, discarded: what came in, in the order of arrival. refilled: groups asked in place of others.
    """

    def __init__(self, *, size: int, limit: float, rounds: bool) -> None:
        """rounds: ask again only when every group asked has ended, and not for each loss at once."""
        self._size, self._limit, self._rounds = size, max(size, limit), rounds
        self.fresh: list[ScoredGroup] = []
        self.discarded: list[Discarded] = []
        self.refilled = 0
        self._taken_out = 0

    def add(self, outcome: GroupOutcome) -> None:
        """Take in a group that has ended, or that the update will end."""
        if isinstance(outcome, Discarded):
            self.discarded.append(outcome)
        else:
            self.fresh.append(outcome)

    def refill(self) -> int:
        """Return how many groups to ask now in place of lost ones, and count them as asked."""
        running = self.asked - self.ended
        if self._rounds and running:
            return 0
        missing = self._size - len(self.fresh) - running
        more = int(max(0, min(missing, self._limit - self.asked)))
        self.refilled += more
        return more

    def take_out_discarded(self) -> tuple[Discarded, ...]:
        """The discarded groups so far, which it then forgets; they still count as having ended."""
        taken, self.discarded = tuple(self.discarded), []
        self._taken_out += len(taken)
        return taken

    @property
    def asked(self) -> int:
        """Groups that were asked for this batch."""
        return self._size + self.refilled

    @property
    def ended(self) -> int:
        """Groups that came in."""
        return len(self.fresh) + len(self.discarded) + self._taken_out

    @property
    def complete(self) -> bool:
        """Whether it is to be learned from as it stands; to be looked at after `refill`."""
        return self.ended >= self.asked

    @property
    def limited(self) -> bool:
        """Whether it is complete only because no more groups may be asked for it."""
        return self.complete and self._limit > self._size > len(self.fresh)


def sort_out(outcome: GroupOutcome, *, version: int, settings: LearnerSection, oldest: int = 0) -> GroupOutcome:
    """Discard what a learner at this version cannot, or must not, learn from, as it is or for its age.

    oldest: version before which nothing may have been sampled, for the policy then was given up.
    """
    if isinstance(outcome, Discarded):
        return outcome
    for reason, detail in _faults(outcome, version, settings, oldest):
        return discard(outcome, reason, detail)
    return outcome


def _faults(
    scored: ScoredGroup, version: int, settings: LearnerSection, oldest: int
) -> Iterator[tuple[DiscardReason, str]]:
    completions = scored.group.completions
    if not any(completion.length for completion in completions):
        yield "invalid", "no completion has a token"
        return
    if not all(map(isfinite, scored.rewards)):
        yield "invalid", "a reward is not finite"
    if isinstance(settings.objective.advantage, EnvironmentAdvantage):
        if not scored.token_advantages:
            yield (
                "invalid",
                'it brings no token advantages, which learner.objective.advantage = "environment" learns from',
            )
        if not all(map(isfinite, chain.from_iterable(scored.token_advantages))):
            yield "invalid", "a token advantage is not finite"
    if isinstance(settings.reference, EnvironmentReference) and not scored.reference_logprobs:
        yield (
            "invalid",
            'it brings no log-probabilities of a reference, which learner.kl_penalty.reference = "environment" needs',
        )
    if settings.objective.mask_truncated and all(c.finish_reason == "length" or not c.length for c in completions):
        yield (
            "zero_variance",
            "every completion was cut off, and learner.objective.mask_truncated learns from none of those",
        )
    sampled = scored.group.oldest_version
    if sampled < oldest:
        yield "stale", "sampled before the policy went back to an earlier one"
    if version - sampled > settings.max_staleness:
        yield "stale", f"{version - sampled} versions old, learner.max_staleness is {settings.max_staleness}"


def discard(scored: ScoredGroup, reason: DiscardReason, detail: str) -> Discarded:
    """End a group that had been scored, with all that is known of it."""
    return Discarded(
        prompt=scored.group.prompt,
        reason=reason,
        detail=detail,
        completions=scored.group.completions,
        rewards=scored.rewards,
        parts=scored.parts,
    )
