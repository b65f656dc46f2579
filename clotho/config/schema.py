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
    EngineSection,
    EvalSection,
    KvPolicy,
    MonitorSection,
    ParitySection,
    QueuesSection,
    RolloutsSection,
    ServerSection,
)
from clotho.config.sections_training import CollapseDetectionSection, LearnerSection, ReplaySection

__all__ = [
    "ActorSection",
    "AtroposSection",
    "CheckpointSection",
    "CollapseDetectionSection",
    "DataSection",
    "EngineSection",
    "EnvironmentSection",
    "EvalSection",
    "KvPolicy",
    "LearnerSection",
    "ModelSection",
    "MonitorSection",
    "ParitySection",
    "PolicySection",
    "Profile",
    "QueuesSection",
    "ReplaySection",
    "RewardSection",
    "RolloutsSection",
    "SamplingSection",
    "ServerSection",
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
    collapse_detection: CollapseDetectionSection = CollapseDetectionSection()
    parity: ParitySection = ParitySection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    server: ServerSection = ServerSection()
    atropos: AtroposSection = AtroposSection()
    environments: tuple[EnvironmentSection, ...] = ()
    engine: EngineSection = EngineSection()
    rollouts: RolloutsSection = RolloutsSection()
    queues: QueuesSection = QueuesSection()
    monitor: MonitorSection = MonitorSection()
    actors: tuple[ActorSection, ...] = ()
