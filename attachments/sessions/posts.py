"""The format of POST /v1/rewards."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_RECEIPTS = 1024

Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,256}$")]
Scenario = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")]


class RewardPost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/rewards.

    session: its name; `reward` is for all answers that have none of their own, and ends the session. receipts: of
    single answers, each with the same `reward`, or one of `rewards`. group: what the rewarded are compared with;
    absent: the other rewards of `scenario`. close: the group is complete, with the members that it has. feedback: a
    text for the event log.
    """

    session: Name | None = None
    receipts: Annotated[list[Name], Meta(min_length=1, max_length=MAX_RECEIPTS)] | None = None
    reward: float | None = None
    rewards: Annotated[list[float], Meta(min_length=1, max_length=MAX_RECEIPTS)] | None = None
    group: Name | None = None
    scenario: Scenario = "default"
    close: bool = False
    feedback: Annotated[str, Meta(max_length=65_536)] | None = None

    @property
    def amounts(self) -> list[float]:
        """The reward of the session, or of each receipt; empty if only a group is closed."""
        if self.rewards is not None:
            return self.rewards
        return [] if self.reward is None else [self.reward] * len(self.receipts or "1")


class Rewarded(Struct, frozen=True, kw_only=True):
    """The response. rewarded: number of rewards that were accepted. members: of the group, of `group_size`.

    complete: the group is on its way to the learner.
    """

    rewarded: int
    group: str | None
    members: int
    group_size: int
    complete: bool
