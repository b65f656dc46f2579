"""The profile: every setting of a run, as frozen structs that refuse unknown keys and values out of range."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from clotho.config.bounds import Off, Positive, about
from clotho.config.sections_data import DataSection, ModelSection, PolicySection, RewardSection, SamplingSection
from clotho.config.sections_run import (
    ActorSection,
    AtroposSection,
    CheckpointSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    HeldOutEvaluation,
    HttpServer,
    MonitorSection,
    ParityCheck,
    ParitySection,
    QueuesSection,
    RolloutsSection,
    ServerSection,
)
from clotho.config.sections_training import CollapseSection, LearnerSection, ReplaySection, WarnOnCollapse


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the whole run."""

    model: ModelSection
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Meta(min_length=1)]
    steps: Annotated[Positive, about("Number of batches that the run trains on.")] = 100
    seed: Annotated[int, about("Seed of all random number generators.", ge=0, lt=2**32)] = 0
    asynchronous: Annotated[bool, about("Sample during updates; false is strictly on-policy.")] = field(
        name="async", default=True
    )
    run_dir: Annotated[str, about("Directory of the run; {profile} is the name of the profile.")] = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: LearnerSection = LearnerSection()
    replay: ReplaySection = Off()
    collapse_detection: CollapseSection = WarnOnCollapse()
    parity: ParitySection = ParityCheck()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = HeldOutEvaluation()
    server: ServerSection = HttpServer()
    atropos: AtroposSection = Off()
    environments: tuple[EnvironmentSection, ...] = ()
    engine: EngineSection = EngineSection()
    rollouts: RolloutsSection = RolloutsSection()
    queues: QueuesSection = QueuesSection()
    monitor: MonitorSection = MonitorSection()
    actors: tuple[ActorSection, ...] = ()
