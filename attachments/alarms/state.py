"""Collapse detection: statistics of a batch, the state that a checkpoint keeps, and the verdict."""

from __future__ import annotations

from msgspec import Struct

from protocols.finding import Finding


class GroupStatistics(Struct, frozen=True, kw_only=True):
    """Statistics of one scored group; means and fractions over its completions.

    source: name of the environment. lowest: lowest reward of a completion.
    truncated: fraction of completions cut off at `sampling.max_tokens`.
    empty_form: fraction of completions with the full format reward and no content reward.
    content: fraction of completions with any content reward.
    empty_form and content are None if format or content is not rewarded.
    """

    source: str = ""
    reward: float
    lowest: float
    length: float
    truncated: float
    empty_form: float | None = None
    content: float | None = None


class BatchStatistics(Struct, frozen=True, kw_only=True):
    """Statistics of a batch and of its update; None if not available.

    reward_error: standard error of `reward`.
    rewards, shares: mean reward of each environment's groups, and their fraction of the batch.
    entropy, kl, update_kl: nats per token. ess: fraction of the tokens. learning_rate: of the update.
    The other fields are means of those of `GroupStatistics`.
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
    update_kl: float | None = None
    learning_rate: float | None = None


class BaselineStatistics(Struct, frozen=True, kw_only=True):
    """Medians over the latest `window` healthy updates, reduced over the run; None until the window is full once.

    | field | statistic | reduction over the run | check triggers if the batch is |
    |---|---|---|---|
    | rewards | median reward, per environment | maximum | lower |
    | reward_error | median standard error of the mean reward | that of the highest reward | lower by more than noise |
    | entropy_most | median entropy | maximum | lower |
    | entropy_least | median entropy | minimum | higher |
    | length | median completion length | latest | longer |
    | truncated | median truncated fraction | minimum | higher |
    | empty_form | median fraction of format without content | minimum | higher |
    | content | median fraction with content | maximum | lower (with empty_form) |
    """

    rewards: dict[str, float] = {}
    reward_error: float | None = None
    entropy_most: float | None = None
    entropy_least: float | None = None
    length: float | None = None
    truncated: float | None = None
    empty_form: float | None = None
    content: float | None = None


class CollapseState(Struct, frozen=True, kw_only=True):
    """The detector's state, as a checkpoint keeps it. The default is the state of a new run.

    bad: number of consecutive updates with triggered checks. lowest: lowest reward of any completion of the run.
    groups: the latest groups; small batches are assessed together with these.
    healthy: statistics of the latest healthy updates.
    """

    bad: int = 0
    lowest: float | None = None
    groups: tuple[GroupStatistics, ...] = ()
    healthy: tuple[BatchStatistics, ...] = ()
    baseline: BaselineStatistics = BaselineStatistics()


NAME = "alarms"
"""Name of the part in checkpoints."""


class AlarmsState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of the collapse detection, beside the policies of rollbacks.

    rollbacks: number of rollbacks since the run began. healthy_updates: as `RollbackPolicy` counts them.
    """

    collapse: CollapseState = CollapseState()
    rollbacks: int = 0
    healthy_updates: int = 0


class CollapseVerdict(Struct, frozen=True, kw_only=True):
    """The assessment of a batch. findings: of the triggered checks. tripped: triggered for `patience` updates."""

    findings: tuple[Finding, ...]
    tripped: bool

    @property
    def healthy(self) -> bool:
        """Whether the batch triggers no check."""
        return not self.findings
