"""The profile: every setting of a run, as frozen structs that refuse unknown keys and values out of range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct, field

from clotho.settings.bounds import (
    Fraction,
    ModuleName,
    NonNegative,
    Off,
    Positive,
    PositiveFloat,
    Variant,
    ZeroIsOff,
    about,
)
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.settings.model import ModelSection, PolicySection
from clotho.settings.server import HttpServer, ServerSection
from training_run.profile.data import DataSection, RewardSection

Mode = Literal["replace", "insert", "tap", "add"]
Restart = Literal["permanent", "transient", "temporary"]
Display = Literal["auto", "live", "plain", "none"]


class ParityCheck(Variant, frozen=True, kw_only=True, tag="check"):
    """The log-probabilities are compared at the start, and after a weight swap as often as the budget allows."""

    tokens: Annotated[
        Positive, about("Number of tokens that a parity check compares, and most rows of its decode steps, up to 32.")
    ] = 32
    warn_nats: Annotated[PositiveFloat | None, about("Log a larger difference of one token; none: by type.")] = None
    stop_kl: Annotated[PositiveFloat | None, about("A larger mean KL divergence ends the run; none: by type.")] = None
    budget: Annotated[
        Fraction, about("Largest share of the training time for parity checks; 0: at the start only; 1: every swap.")
    ] = 0.01


ParitySection = Annotated[Off | ParityCheck, about("Comparison of sampler and learner log-probabilities.")]


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of the whole run."""

    interval: Annotated[NonNegative, about("Steps between checkpoints; 0 writes one at the end.")] = 10
    keep_last: Annotated[Positive, about("Number of checkpoints that stay on disk.")] = 3
    adapter_path: Annotated[str, about("Directory of a second copy of the final adapter; empty: no copy.")] = ""


class HeldOutEvaluation(Variant, frozen=True, kw_only=True, tag="heldout"):
    """Accuracy, rewards and loss on held-out problems: before, after and during training."""

    interval: Annotated[NonNegative, about("Steps between evaluations; 0: before and after training.")] = 0
    problems: Annotated[NonNegative, about("Number of held-out problems before and after training; 0 means all.")] = 0
    problems_between: Annotated[NonNegative, about("Held-out problems during training; 0: eval.problems.")] = 0
    samples: Annotated[
        int, about("Sampled completions per held-out problem for avg@k and pass@k; 0: greedy only.", ge=0, le=4096)
    ] = 0


EvalSection = Annotated[Off | HeldOutEvaluation, about("Evaluation of the policy on held-out problems.")]


class RolloutsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far rollouts run ahead of the learner."""

    max_batches_ahead: Annotated[Positive, about("Limit of batches in progress beyond the batch in training.")] = 2
    lag: Annotated[NonNegative, about("Age of every batch in updates, with async = false; to study staleness.")] = 0
    scoring: Annotated[
        Positive | None, about("Groups that are scored at the same time; none: 8, or the largest `max_workers`.")
    ] = None


class QueuesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacities of the queues between actors; a full queue blocks its sender."""

    prompts: Annotated[Positive, about("Capacity of the queue from the prompter to the generator.")] = 16
    rollouts: Annotated[Positive, about("Capacity of the queue from the generator to the scorer.")] = 16
    scored: Annotated[Positive, about("Capacity of the queue of scored groups to the learner.")] = 16
    reports: Annotated[Positive, about("Capacity of the queues of step reports from the learner.")] = 4


class ActorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An actor of your own."""

    name: Annotated[str, about("Name of the custom actor in logs, errors and statistics.", min_length=1)]
    factory: Annotated[ModuleName, about("Class of the custom actor, as module:Class.")]
    mode: Annotated[Mode, about("Position: replace actor `at`, insert into or tap queue `at`, or add without queues.")]
    at: Annotated[str, about("Actor that is replaced, or queue that is tapped or inserted into.")] = ""
    restart: Annotated[Restart | None, about("Restart policy, as in Erlang/OTP; none: depends on the position.")] = None
    options: Annotated[dict[str, Any], about("Keyword arguments for the custom actor's class.")] = {}

    @property
    def is_in_group_flow(self) -> bool:
        """Whether groups pass through the actor, so that its failure ends the run; false for a monitor."""
        return self.mode == "insert" or (self.mode == "replace" and self.at != "monitor")


class MonitorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output of the run."""

    display: Annotated[Display, about("Terminal output; auto: live on a terminal, plain lines elsewhere.")] = "auto"
    rollouts: Annotated[bool, about("Write every rollout to rollouts.jsonl.")] = True
    prevent_sleep: Annotated[bool, about("On macOS, prevent idle sleep of the system; the display may sleep.")] = True
    watchdog_seconds: Annotated[
        PositiveFloat, about("Time until a stalled turn, a slow start or a lost group is reported.")
    ] = 120.0
    drain_seconds: Annotated[PositiveFloat, about("Longest time without a step while a run drains.")] = 600.0


class MemorySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the memory of MLX."""

    cache_limit_mib: Annotated[Positive, about("Limit of MLX's cache of freed buffers, in MiB.")] = 512
    wired_limit_mib: Annotated[ZeroIsOff, about("Memory that macOS keeps resident on Metal, in MiB; 0: none.")] = 0


class TrackingSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of the run in trackers; an Atropos API server receives project and group too."""

    project: Annotated[str, about("Project of the run; empty: clotho.")] = ""
    group: Annotated[str, about("Group of runs that belong together; empty: none.")] = ""
    run_name: Annotated[str, about("Name of the run; empty: that of the run directory.")] = ""
    tags: Annotated[tuple[str, ...], about("Labels of the run.")] = ()


Asynchronous = Annotated[bool, about("Sample during updates; false is strictly on-policy.")]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the whole run."""

    model: ModelSection
    data: DataSection
    rewards: tuple[RewardSection, ...] = ()
    steps: Annotated[Positive, about("Number of batches that the run trains on.")] = 100
    seed: Annotated[int, about("Seed of all random number generators.", ge=0, lt=2**32)] = 0
    asynchronous: Asynchronous = field(name="async", default=True)
    run_dir: Annotated[str, about("Directory of the run; {profile} is the name of the profile.")] = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: LearnerSection = LearnerSection()
    parity: ParitySection = ParityCheck()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = HeldOutEvaluation()
    server: ServerSection = HttpServer()
    engine: EngineSection = EngineSection()
    rollouts: RolloutsSection = RolloutsSection()
    queues: QueuesSection = QueuesSection()
    memory: MemorySection = MemorySection()
    monitor: MonitorSection = MonitorSection()
    tracking: TrackingSection = TrackingSection()
    actors: tuple[ActorSection, ...] = ()

    @property
    def max_batches_ahead(self) -> int:
        """Limit of batches in progress beyond the batch in training; with async = false it is `rollouts.lag`."""
        return self.rollouts.max_batches_ahead if self.asynchronous else self.rollouts.lag

    @property
    def max_staleness(self) -> int:
        """Groups that are more versions old are discarded. The default leaves slow groups time for twice the lead."""
        given = self.learner.max_staleness
        return max(4, 2 * self.max_batches_ahead) if given is None else given
