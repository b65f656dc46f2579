"""What alarms say, and what they remember: how batches look, and what they are compared with."""

from __future__ import annotations

from msgspec import Struct


class GroupLook(Struct, frozen=True, kw_only=True):
    """How one scored group looks; shares and means over its completions.

    lowest: the lowest reward of a completion. truncated: share cut off at `sampling.max_tokens`. empty_form: share with
    full marks for form and none for content; content: share with any; both None where form or content is not rewarded.
    source: the environment that it comes from.
    """

    source: str = ""
    reward: float
    lowest: float
    length: float
    truncated: float
    empty_form: float | None = None
    content: float | None = None


class BatchLook(Struct, frozen=True, kw_only=True):
    """How a batch looks: groups together, and the update that was made from it; None where there is nothing to see.

    reward_error: standard error of `reward`. rewards, shares: mean reward of the groups of each environment, and how
    much of the batch they are. entropy, kl, step_kl: nats per token; ess: share of the tokens.
    """

    reward: float | None = None
    reward_error: float | None = None
    rewards: dict[str, float] = {}
    shares: dict[str, float] = {}
    length: float | None = None
    truncated: float | None = None
    empty_form: float | None = None
    content: float | None = None
    entropy: float | None = None
    kl: float | None = None
    ess: float | None = None
    step_kl: float | None = None


class Normal(Struct, frozen=True, kw_only=True):
    """What is normal; None while too few healthy updates have been seen.

    length: the median of the latest healthy updates. The others: the healthiest that this median has been, the highest
    of rewards (by environment), content and entropy_most, the lowest of entropy_least, truncated and empty_form.
    """

    rewards: dict[str, float] = {}
    entropy_most: float | None = None
    entropy_least: float | None = None
    length: float | None = None
    truncated: float | None = None
    empty_form: float | None = None
    content: float | None = None


class AlarmState(Struct, frozen=True, kw_only=True):
    """All that alarms remember; the default is that of a beginning.

    bad: updates in a row that look bad. lowest: the lowest reward of any completion so far. groups: the latest, for
    batches that are too small to compute_advantages alone. healthy: the latest healthy updates.
    """

    bad: int = 0
    lowest: float | None = None
    groups: tuple[GroupLook, ...] = ()
    healthy: tuple[BatchLook, ...] = ()
    normal: Normal = Normal()


class Verdict(Struct, frozen=True, kw_only=True):
    """What alarms make of a batch. signs: of collapse or cheating, in words. tripped: they have lasted long enough."""

    signs: tuple[str, ...]
    tripped: bool

    @property
    def healthy(self) -> bool:
        """Whether nothing looks bad."""
        return not self.signs
