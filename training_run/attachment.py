"""Attachments of a run: what a folder of `attachments/` adds, and when it is asked.

A folder takes part through `attachment.py`, whose `ATTACHMENT` is an instance of a subclass of `Attachment`. Nothing
else names a folder, so that a run without it is a run that lacks its feature and nothing else. What the folder adds to
the library is in its `library.py` (`clotho/extension.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field

from clotho.extension import attachment_modules, attachment_names

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp

    from clotho.inference.engine import DecodeEngine
    from clotho.lanes.compute_thread import Compute
    from clotho.lanes.sampling_client import GroupSampler
    from clotho.models.tokenizer import ChatTokenizer
    from clotho.serving.services import SampleRecorder
    from clotho.settings.server import HttpServer
    from clotho.training.gradient import OtherRanks
    from clotho.training.optimizers import StepRule
    from protocols.accounting import Balance
    from protocols.batches import GroupSupply
    from protocols.finding import Finding
    from protocols.prompt import Problem
    from protocols.queues import Inbox
    from protocols.rollout import GroupRewards
    from protocols.step import PolicyUpdated, UpdateMetrics
    from protocols.summary import MemoryEstimate
    from training_run.directory.checkpoint_parts import CheckpointParts
    from training_run.directory.run_directory import RunDirectory
    from training_run.groups.rollout_source import Episodes
    from training_run.memory.need import MemoryNeed
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.rules import Complaint, Rule
    from training_run.profile.schema import Profile
    from training_run.records.display import RunFacts
    from training_run.rewards.worker_process import NewWorker
    from training_run.run import RunContext
    from training_run.stages import StagePlan
    from training_run.supervision.hooks import Chooser, Measure, ReportObserver, UpdateHook
    from training_run.supervision.queues import Queue
    from training_run.supervision.supervisor import Child

Attach = Callable[["RunContext"], Awaitable[None]]
MakeEpisodes = Callable[["ChatTokenizer", int], "Episodes"]
"""Makes the source of episodes with the tokenizer and the context length of a policy."""


class Plan(Struct, kw_only=True, eq=False):
    """Start-up -> attachments, before the policy is loaded. What an attachment sets decides how the run is loaded.

    ending: closed when the run ends, also if its start fails; last in, first out. token_values: updates return the
    values of their tokens; may be set, and is never cleared. measured_updates: of so many updates in a row it is
    measured how far they move the policy; may be raised. ranks: compute shares of every gradient; None: this process
    computes them alone. workers: what starts the workers of rewards, by the value of `rewards.where`. learns_equal:
    groups with equal rewards are trained on, because there is more to learn from than rewards; may be set.
    rule: of optimizer steps; None: that of the optimizer alone.
    """

    profile: Profile
    directory: RunDirectory
    ending: ExitStack
    token_values: bool = False
    measured_updates: int = 0
    ranks: OtherRanks | None = None
    workers: dict[str, NewWorker] = field(default_factory=dict)
    learns_equal: bool = False
    rule: StepRule | None = None


class Wired(Struct, frozen=True, kw_only=True, eq=False):
    """Wiring -> attachments: what is known when the actors of the flow have been constructed.

    queues: all queues of the run, those of a channel in the order in which messages pass them. facts: of the display.
    """

    queues: Sequence[Queue[Any]]
    facts: RunFacts


class Attached(Struct, kw_only=True, eq=False):
    """Attachments -> wiring: what they have added to a run that is loaded and has not begun.

    ending: closed when the run ends, last in, first out. parts: what they keep in checkpoints. hooks: asked by the
    learner. observers: told by the monitor. updates: queues to those that receive every update, by name.

    Slots: chooser: of problems; None: the order of the dataset. sampler: samples the rollouts; None: the run's own
    engine. groups: come in the place of those that the run makes from its dataset; None: it makes them. episodes: come
    in the place of completions; None: a group has completions of its prompt.

    Children: services: beside the flow of groups. receivers: start before those that make groups. senders: start last.
    recorders: return children that record the flow.

    scoring: wraps what scores groups, the rewards of the run or what was wrapped before.

    samples: records what clients of the HTTP server have sampled. measures: return values of metrics for the next line
    of metrics.jsonl. metrics: yield metrics for /metrics. balances: how what they count has ended, by the name in the
    summary. sampled_elsewhere: returns the number of tokens that others than the engine of the run have sampled.
    """

    ending: ExitStack
    parts: CheckpointParts
    chooser: Chooser | None = None
    hooks: list[UpdateHook] = field(default_factory=list)
    observers: list[ReportObserver] = field(default_factory=list)
    services: list[Child] = field(default_factory=list)
    receivers: list[Child] = field(default_factory=list)
    senders: list[Child] = field(default_factory=list)
    recorders: list[Callable[[Wired], Child]] = field(default_factory=list)
    updates: dict[str, Queue[PolicyUpdated]] = field(default_factory=dict)
    sampler: GroupSampler | None = None
    groups: GroupSupply[Any] | None = None
    episodes: Episodes | None = None
    scoring: list[Callable[[GroupRewards], GroupRewards]] = field(default_factory=list)
    samples: SampleRecorder | None = None
    measures: list[Measure] = field(default_factory=list)
    metrics: list[Callable[[], Iterable[Metric]]] = field(default_factory=list)
    balances: dict[str, Callable[[], Balance]] = field(default_factory=dict)
    sampled_elsewhere: Callable[[], int] = int

    def receive_updates(self, name: str) -> Inbox[PolicyUpdated]:
        """Return the inbox of a further receiver of updates. The learner waits until it has taken the last one."""
        from training_run.supervision.queues import Queue

        self.updates[name] = queue = Queue["PolicyUpdated"](f"updates.{name}", capacity=1)
        return queue.inbox()


class Generator(Struct, frozen=True, kw_only=True):
    """A source of generated problems; the key is the prefix of its datasets, such as `reasoning_gym:`.

    open: called with `[data]`, returns a context manager of a `training_run.profile.generators.Generate`. weights:
    called with `[data]` and the problems, returns the weight of each type in an epoch. rewards: `[[rewards]]` of a
    profile that lists none.
    """

    open: str
    weights: str
    rewards: tuple[Mapping[str, Any], ...] = ()


SLOTS = {
    "sampler": "where rollouts are sampled",
    "episodes": "whether the policy completes a prompt or acts in an environment",
    "groups": "where groups come from",
    "chooser": "of which problems groups are",
}
"""What at most one attachment of a run decides: name of the slot -> what it is, in a refusal."""


class Attachment:
    """What one folder adds to a run. An instance has no state: that of a run lives in what `prepare` returns.

    no_effect, contradictions: rows for the tables of these names in `training_run/profile/rules.py`. may_change: keys
    of the attachment, and their beginnings, that a resumed run may change. commands: word after the program's name ->
    module, whose `run(argv, console)` returns the exit status. directories: name of a directory of the run -> pattern
    of the names of its entries; other entries are not deleted with a run. metrics: name in metrics.jsonl -> what it is,
    in a sentence; null in a step of which nothing returns it. entries: the keys of metrics that are tables by name.
    generators: sources of generated problems, by the prefix of their datasets, such as `reasoning_gym:`.

    Every method adds nothing by default. They are called in the order below. `attachment.py` is imported at every
    start, so that it imports what is expensive only where it is used.
    """

    no_effect: Sequence[Rule] = ()
    contradictions: Sequence[Rule] = ()
    may_change: Sequence[str] = ()
    commands: ClassVar[Mapping[str, str]] = {}
    directories: ClassVar[Mapping[str, str]] = {}
    metrics: ClassVar[Mapping[str, str]] = {}
    entries: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    generators: ClassVar[Mapping[str, Generator]] = {}

    def launch(self, argv: Sequence[str]) -> int | None:
        """Take over a process that `mlx.launch` has started for a run; return its exit status.

        None: it is the process of the run. argv: the arguments of the run. Called before MLX is imported.
        """

    def supervise(self, profile: Profile) -> None:
        """Replace the process of a run by a supervisor of it, if the profile says so.

        Called before the run directory is opened; never in a program that calls `main` with arguments.
        """

    def slots(self, profile: Profile) -> Mapping[str, str]:
        """Return the slots that the attachment fills, or that have no use with it: name -> the setting that says so.

        The setting begins with its key, such as `cluster = "ray"`.
        """
        return {}

    def complaints(self, profile: Profile) -> Iterable[Complaint]:
        """Return what is wrong between settings, beyond the rows of the two tables."""
        return ()

    def stages(self, profile: Profile) -> Sequence[StagePlan]:
        """Return the stages of a run, in order. Raises ProfileError."""
        return ()

    def children(self, profile: Profile) -> Sequence[str]:
        """Return names of children that the attachment starts, which no custom actor may have."""
        return ()

    def replaces_weights(self, server: HttpServer) -> bool:
        """Whether clients of `serve` replace the weights of its model. Raises ProfileError for a contradiction."""
        return False

    def may_differ(self, key: str, old: Profile, new: Profile) -> bool:
        """Whether a resumed run may have another value of a key: by default, if it is in `may_change`."""
        return any(key == allowed or key.startswith(f"{allowed}.") for allowed in self.may_change)

    def check(self, profile: Profile) -> None:
        """Raise ProfileError for what cannot work; in milliseconds, and before the run directory is touched."""

    def facts(self, profile: Profile) -> Mapping[str, str]:
        """Return what `doctor` says about a machine or a profile, by subject."""
        return {}

    def findings(self, profile: Profile, estimate: MemoryEstimate) -> Iterable[Finding]:
        """Examine machine and profile, before the policy is loaded. estimate: memory of the run."""
        return ()

    def findings_when_loaded(
        self, profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem]
    ) -> Iterable[Finding]:
        """Examine what has been loaded, without a completion. problems: those for training."""
        return ()

    def rewind(self, directory: RunDirectory, step: int, place: Path | None) -> None:
        """Remove what the attachment has recorded in a run directory about later steps than `step`.

        place: directory that keeps what is removed; None: nothing does. Raises OSError.
        """

    def watches(self, compute: Compute, engine: DecodeEngine) -> Sequence[Child]:
        """Return children that look after a decode engine, in a run and in `serve`."""
        return ()

    def memory(self, need: MemoryNeed) -> None:
        """Raise what the estimate of memory assumes; a function of the settings in `need`."""

    async def prepare(self, plan: Plan) -> Attach | None:
        """Begin what must exist before the policy is loaded. The returned function completes the loaded run.

        It receives the run before its first actor is constructed, and adds to `run.attached`. None: the run does not
        use the attachment.
        """

    async def evaluated(self, profile: EvaluationProfile, ending: ExitStack) -> MakeEpisodes | None:
        """Begin what must exist before `eval` loads its model. The returned function makes its episodes.

        None: `eval` samples completions. ending: closed when the command ends.
        """

    def rehearsed(self, profile: Profile, updates: Sequence[UpdateMetrics]) -> Iterable[Finding]:
        """Assess updates that `doctor` has computed one after another, and discarded."""
        return ()

    def described(self, parts: CheckpointParts) -> Mapping[str, Any]:
        """Return what `show` says about a checkpoint with these parts, whose arrays are not read."""
        return {}

    def loading_page(self, server: HttpServer) -> ASGIApp | None:
        """Return what a server answers on paths that need no key while the model is loaded; None: nothing."""
        return None

    def shown(self, line: Mapping[str, Any]) -> Iterable[str]:
        """Return what the displays in the terminal show of a line of metrics.jsonl."""
        return ()


@cache
def installed_attachments() -> tuple[Attachment, ...]:
    """Return the attachments of this installation that take part in runs, by the names of their folders."""
    return tuple(module.ATTACHMENT for module in attachment_modules("attachment").values())


def slot_settings(profile: Profile, slot: str) -> list[str]:
    """Return the settings that decide what is in a slot; none if the run itself decides."""
    claims = (attachment.slots(profile) for attachment in installed_attachments())
    return [claim[slot] for claim in claims if slot in claim]


def has_own_groups(profile: Profile) -> bool:
    """Whether a run makes its groups itself, from its dataset and with its rewards."""
    return not slot_settings(profile, "groups")


def unknown_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each part of a checkpoint whose attachment this installation lacks."""
    return tuple(
        f"the checkpoint has state of the attachment '{name}', which this installation lacks: it is dropped"
        for name in sorted(set(names) - set(attachment_names()))
    )


@cache
def attached_metrics() -> Mapping[str, str]:
    """Return the metrics of all attachments, with their descriptions."""
    return {name: text for attachment in installed_attachments() for name, text in attachment.metrics.items()}


def shown_by_attachments(line: Mapping[str, Any]) -> list[str]:
    """Return what the displays show of the attachments. line: of metrics.jsonl."""
    return [text for attachment in installed_attachments() for text in attachment.shown(line)]


def attachment_directories() -> dict[str, str]:
    """Return the directories of a run that attachments write: name -> pattern of the names of its entries."""
    return {name: pattern for one in installed_attachments() for name, pattern in one.directories.items()}


def check_attachments(profile: Profile) -> None:
    """Raise ProfileError for what an attachment knows that cannot work."""
    for attachment in installed_attachments():
        attachment.check(profile)


def weights_are_replaced(server: HttpServer) -> bool:
    """Whether clients of `serve` replace the weights of its model. Raises ProfileError for a contradiction."""
    return any(attachment.replaces_weights(server) for attachment in installed_attachments())
