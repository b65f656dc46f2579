"""The profile: every setting of a run, as frozen structs that refuse unknown keys and values out of range."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from clotho.config.bounds import Positive
from clotho.config.sections_data import (
    DataSection,
    ModelSection,
    PolicySection,
    RewardSection,
    SamplingSection,
)
from clotho.config.sections_run import (
    ActorSection,
    AtroposSection,
    CheckpointSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    KvPolicy,
    MonitorSection,
    ParitySection,
    QueuesSection,
    RolloutsSection,
    ServerSection,
)
from clotho.config.sections_training import CollapseDetectionSection, LearnerSection, NoReplay, ReplaySection

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
    """Settings of the whole run."""

    model: ModelSection
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Meta(min_length=1)]
    steps: Annotated[Positive, Meta(description="Number of batches that the run trains on.")] = 100
    seed: Annotated[int, Meta(ge=0, lt=2**32, description="Seed of all random number generators.")] = 0
    asynchronous: Annotated[
        bool, Meta(description="Sample the next batches while the learner updates; false is strictly on-policy.")
    ] = field(name="async", default=True)
    run_dir: Annotated[
        str, Meta(description="Directory that the run writes to; {profile} stands for the profile's name.")
    ] = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: LearnerSection = LearnerSection()
    replay: Annotated[ReplaySection, Meta(description="Groups that are trained on more than once.")] = NoReplay()
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
