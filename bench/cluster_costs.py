"""What the simulation of a cluster knows: measured costs, the groups of a run, and the settings of the run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0.0)]


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs in seconds and bytes. A decode step with r rows takes `step_seconds` + r * `row_seconds`.

    An update takes `update_seconds` + t * `update_token_seconds` for t tokens of the groups that are trained on.
    """

    step_seconds: Annotated[float, Meta(ge=0, description="Decode step, without its rows.")]
    row_seconds: Annotated[float, Meta(ge=0, description="Row of a decode step.")]
    group_seconds: Annotated[float, Meta(ge=0, description="Prompt and answer of a group, in a worker.")] = 0.0
    update_seconds: Annotated[float, Meta(ge=0, description="Update, without its tokens.")]
    update_token_seconds: Annotated[float, Meta(ge=0, description="Trained token of an update.")]
    version_seconds: Annotated[float, Meta(ge=0, description="Swap and parity check of a version, on the learner.")] = (
        0.0
    )
    score_seconds: Annotated[float, Meta(ge=0, description="Rewards of a group; eight groups at once.")] = 0.0
    publish_seconds: Annotated[float, Meta(ge=0, description="Time until a version is in the object store.")] = 0.0
    load_seconds: Annotated[float, Meta(ge=0, description="Verification and swap of a version, in a worker.")] = 0.0
    head_group_seconds: Annotated[float, Meta(ge=0, description="Event loop of the run, for a group.")] = 0.0
    head_call_seconds: Annotated[float, Meta(ge=0, description="Event loop of the run, for a call to a worker.")] = 0.0
    latency_seconds: Annotated[float, Meta(ge=0, description="Time of a message to or from a worker.")] = 0.0
    weight_bytes: Annotated[float, Meta(ge=0, description="Size of a version.")] = 0.0
    token_bytes: Annotated[float, Meta(ge=0, description="Size of a token in an answer.")] = 0.0
    bandwidth: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Bytes per second of the learner's machine, each way; not given: transfers take no time."),
    ] = None
    failures_per_hour: Annotated[float, Meta(ge=0, description="Failures of a worker.")] = 0.0
    detection_seconds: Annotated[float, Meta(ge=0, description="Time until a failure is noticed.")] = 5.0
    recovery_seconds: Annotated[float, Meta(ge=0, description="Time until a failed worker runs again.")] = 10.0
    cores: Annotated[float, Meta(ge=0, description="Cores of a machine; 0: every process has a device of its own.")] = (
        0.0
    )
    efficiency: Annotated[
        float, Meta(gt=0, le=1, description="Rate of a process while all cores compute, relative to one alone.")
    ] = 1.0


class Workload(Struct, frozen=True, kw_only=True):
    """The groups of a run, which the simulation draws from. lengths: tokens of each completion.

    zero_variance: whether the group is discarded for its rewards.
    """

    lengths: tuple[tuple[int, ...], ...]
    zero_variance: tuple[bool, ...]

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a completion."""
        return sum(map(sum, self.lengths)) / sum(map(len, self.lengths))

    def changed(
        self, *, mean_tokens: float | None = None, group_size: int | None = None, zero_variance: float | None = None
    ) -> Workload:
        """Return the groups with another mean length, group size or share of zero-variance groups.

        Lengths are multiplied, and completions of a larger group are drawn from those of the group. The share of
        zero-variance groups is exact, up to rounding; the groups are chosen at random.
        """
        lengths, flags, chance = self.lengths, self.zero_variance, random.Random(0)
        if group_size is not None:
            lengths = tuple(_sized(group, group_size, chance) for group in lengths)
        if mean_tokens is not None:
            factor = mean_tokens / self.mean_tokens
            lengths = tuple(tuple(max(1, round(factor * length)) for length in group) for group in lengths)
        if zero_variance is not None:
            number = round(zero_variance * len(lengths))
            if 0.0 < zero_variance < 1.0 and len(lengths) < 100:  # enough groups for the share
                repeat = math.ceil(100 / len(lengths))
                lengths, number = lengths * repeat, round(zero_variance * len(lengths) * repeat)
            chosen = set(chance.sample(range(len(lengths)), number))
            flags = tuple(position in chosen for position in range(len(lengths)))
        return Workload(lengths=lengths, zero_variance=flags)


def _sized(group: Sequence[int], size: int, chance: random.Random) -> tuple[int, ...]:
    return tuple(group[:size]) if size <= len(group) else (*group, *chance.choices(group, k=size - len(group)))


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the run and of the cluster; the names are those of the profile where it has the setting."""

    workers: Annotated[int, Meta(ge=1, le=65_536)] = 1
    batch_size: Annotated[int, Meta(ge=1, description="Groups of a batch.")] = 16
    max_batches_ahead: Annotated[int, Meta(ge=0, description="Batches in flight; the lag of a synchronous run.")] = 2
    synchronous: bool = False
    max_staleness: Annotated[int | None, Meta(description="Limit of the staleness of a group; none: the default.")] = (
        None
    )
    sync_interval: Annotated[int, Meta(ge=1, description="Versions between two publications.")] = 1
    local_share: Annotated[float, Meta(ge=0, description="Rows for the run's engine, per row of a worker.")] = 0.0
    decode_share: Annotated[float, Meta(gt=0, lt=1, description="Share of the run's engine during updates.")] = 0.5
    max_num_seqs: Annotated[int, Meta(ge=1, description="Rows of an engine.")] = 256
    dynamic_sampling_max_ratio: Annotated[float, Meta(ge=0, description="Most groups of an update, in batches.")] = 0.0
    workers_per_machine: Annotated[int, Meta(ge=1, description="Workers that share the cores of a machine.")] = 1
    on_learner_machine: bool = False
    steps: Annotated[int, Meta(ge=2, description="Batches that are measured.")] = 50
    warm_up: Annotated[int, Meta(ge=1, description="Batches before; at least twice those in flight.")] = 10
    seed: int = 0

    @property
    def began(self) -> int:
        """Number of batches before the measurement. The first batches in flight need no new weights."""
        return max(self.warm_up, 2 * (self.max_batches_ahead + 1))

    @property
    def staleness_limit(self) -> int:
        """As in a profile."""
        return max(4, 2 * self.max_batches_ahead) if self.max_staleness is None else self.max_staleness
