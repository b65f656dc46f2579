"""The profile: every setting of a run, as frozen structs that refuse unknown keys and bound every number."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from clotho.config.bounds import Positive
from clotho.config.sections_atropos import AtroposSection, EnvironmentSection
from clotho.config.sections_data import (
    DataSection,
    ModelSection,
    PolicySection,
    RewardSection,
    SamplingSection,
)
from clotho.config.sections_run import (
    ActorSection,
    CheckpointSection,
    EvalSection,
    GatewaySection,
    GeneratorSection,
    MailboxesSection,
    MonitorSection,
    WeightsSection,
)
from clotho.config.sections_training import AlarmsSection, LearnerSection, ReplaySection

__all__ = [
    "ActorSection",
    "AlarmsSection",
    "AtroposSection",
    "CheckpointSection",
    "DataSection",
    "EnvironmentSection",
    "EvalSection",
    "GatewaySection",
    "GeneratorSection",
    "LearnerSection",
    "MailboxesSection",
    "ModelSection",
    "MonitorSection",
    "PolicySection",
    "Profile",
    "ReplaySection",
    "RewardSection",
    "SamplingSection",
    "WeightsSection",
]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a run.

    steps: batches that are consumed.
    seed: of every random choice.
    async: let rollouts run ahead of the learner.
    run_dir: where the run writes; `{profile}` stands for the profile's name.
    """

    model: ModelSection
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Meta(min_length=1)]
    steps: Positive = 100
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    asynchronous: bool = field(name="async", default=True)
    run_dir: str = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: LearnerSection = LearnerSection()
    replay: ReplaySection = ReplaySection()
    alarms: AlarmsSection = AlarmsSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    gateway: GatewaySection = GatewaySection()
    atropos: AtroposSection = AtroposSection()
    environments: tuple[EnvironmentSection, ...] = ()
    generator: GeneratorSection = GeneratorSection()
    mailboxes: MailboxesSection = MailboxesSection()
    monitor: MonitorSection = MonitorSection()
    actors: tuple[ActorSection, ...] = ()
