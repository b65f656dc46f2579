"""The profile: every setting of a run, as frozen structs that refuse unknown keys and values out of range."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from clotho.config import sections_run, sections_training
from clotho.config.bounds import Off, Positive, about
from clotho.config.sections_data import DataSection, ModelSection, PolicySection, RewardSection, SamplingSection

Asynchronous = Annotated[bool, about("Sample during updates; false is strictly on-policy.")]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the whole run."""

    model: ModelSection
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Meta(min_length=1)]
    steps: Annotated[Positive, about("Number of batches that the run trains on.")] = 100
    seed: Annotated[int, about("Seed of all random number generators.", ge=0, lt=2**32)] = 0
    asynchronous: Asynchronous = field(name="async", default=True)
    run_dir: Annotated[str, about("Directory of the run; {profile} is the name of the profile.")] = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: sections_training.LearnerSection = sections_training.LearnerSection()
    replay: sections_training.ReplaySection = Off()
    collapse_detection: sections_training.CollapseSection = sections_training.WarnOnCollapse()
    parity: sections_run.ParitySection = sections_run.ParityCheck()
    checkpoint: sections_run.CheckpointSection = sections_run.CheckpointSection()
    eval: sections_run.EvalSection = sections_run.HeldOutEvaluation()
    server: sections_run.ServerSection = sections_run.HttpServer()
    atropos: sections_run.AtroposSection = Off()
    environments: tuple[sections_run.EnvironmentSection, ...] = ()
    engine: sections_run.EngineSection = sections_run.EngineSection()
    rollouts: sections_run.RolloutsSection = sections_run.RolloutsSection()
    queues: sections_run.QueuesSection = sections_run.QueuesSection()
    monitor: sections_run.MonitorSection = sections_run.MonitorSection()
    actors: tuple[sections_run.ActorSection, ...] = ()
