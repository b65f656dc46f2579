"""A run of prompter, generator and learner with a fake engine and a learner that only counts updates."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import anyio
from msgspec import Raw, Struct
from msgspec.msgpack import encode
from msgspec.structs import replace

from actors.generator import Generator as GeneratorActor
from actors.learner import LearnerActor
from actors.prompter import Prompter
from clotho.lanes.compute_thread import Compute
from clotho.training.update import Update
from protocols.checkpoint import Part
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import Sampling
from protocols.step import LearnerReport, PolicyUpdated, StepReport, UpdateMetrics, WeightsReady
from tests.actors.actor_helpers import RecordingSampler, prompt, receive_all
from tests.fakes import FakeEngine
from tests.learner_settings import learner_settings
from training_run.attached import Attached
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.groups.ledger import Ledger
from training_run.groups.progress import LearnerProgress, StalenessRule
from training_run.groups.rollout_source import SingleTurn
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

METRICS = UpdateMetrics(
    loss=0.0, kl=0.0, entropy=1.0, clip_fraction=0.0, mismatch_kl=0.0, ratio_mean=1.0, grad_norm=1.0,
    learning_rate=1.0, trained_tokens=1,
    update_applied=True, ess=1.0, rejected_fraction=0.0, kl_beta=0.0, entropy_coef=0.0,
    optimizer_steps=1,
)  # fmt: skip


class CountingPolicyLearner:
    """A policy learner that only counts its updates."""

    fingerprint, parameters, forcing = "f", None, None

    def __init__(self, version: int) -> None:
        self.version = version

    def update(self, groups: Sequence[ScoredGroup], *, step: int, replayed: Any) -> Update:
        """One version more."""
        self.version += 1
        advantages = tuple((1.0,) * len(group.rewards) for group in groups)
        return Update(
            parameters={}, version=self.version, fingerprint="f", metrics=METRICS, advantages=advantages,
            applied=True, finite=True,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}


PROBLEMS = tuple(
    Problem(prompt=str(index), answer="", type=kind) for index, kind in enumerate(["useful", "hard", "solved"] * 6)
)
"""Problems to choose from. Groups of the type `useful` have the rewards 0 and 1, other groups have zero variance."""


class SimulationSettings(Struct, frozen=True, kw_only=True):
    """Settings of a simulated run. `zero_variance` and `discarded_early` select groups by id.

    attach: lets an attachment take part. If it chooses among `PROBLEMS`, the problem decides the rewards.
    """

    zero_variance: Callable[[int], bool]
    discarded_early: Callable[[int], bool] = lambda group_id: False
    steps: int = 5
    batch_size: int = 3
    ahead: int = 0
    limit: float = 4.0
    dynamic: bool = True
    attach: Callable[[Attached], None] = lambda attached: None


class SimulatedRun:
    """A run from its start or from a checkpoint, with queues of capacity 1.

    `updates` are all updates of the learner; `parts` are those of a checkpoint after each of them.
    """

    def __init__(
        self,
        compute: Compute,
        simulation: SimulationSettings,
        *,
        after: PolicyUpdated | None = None,
        parts: Mapping[str, Part[Raw]] | None = None,
        prompted_until: int = 0,
    ) -> None:
        """prompted_until, parts: as the checkpoint says, which has the rest from `after`."""
        self.simulation, self.engine = simulation, FakeEngine()
        self.ledger, self.progress = Ledger(), LearnerProgress()
        if after is not None:
            self.ledger, self.progress = Ledger(after.ledger), LearnerProgress(step=after.report.step)
        self.policy_learner = CountingPolicyLearner(after.report.version if after else 0)
        self.weights, self.replacements = Latest[WeightsReady]("weights"), Latest[int]("refills")
        self.replacements.put(self.ledger.ended - self.progress.step * simulation.batch_size)
        self._serve(self.policy_learner.version, self.progress.step)
        self.sampler = RecordingSampler(self.engine.submit_call, self.engine)
        self.updates: list[PolicyUpdated] = []
        self.parts: list[dict[str, Part[Raw]]] = []
        self.attached = Attached(ending=ExitStack(), parts=CheckpointParts(parts or {}))
        simulation.attach(self.attached)
        self.chosen: list[tuple[int, Problem]] = []
        self._questions = Queue[Prompt]("questions", capacity=1)
        self._prompts = Queue[Prompt | Discarded]("prompts", capacity=1)
        self._rollouts = Queue[RolloutGroup | Discarded]("rollouts", capacity=1)
        self._scored = Queue[GroupOutcome]("scored", capacity=1)
        self._updates = Queue[PolicyUpdated]("updates", capacity=1)
        self._reports = Queue[LearnerReport]("reports", capacity=1)
        self._make(compute, prompted_until)

    def _make(self, compute: Compute, prompted_until: int) -> None:
        simulation, groups = self.simulation, self.simulation.steps * self.simulation.batch_size
        distribution: dict[str, Any] = {
            "batch_size": simulation.batch_size,
            "replacements": self.replacements,
            "ended": self.ledger.ended,
            "groups": groups if simulation.dynamic else None,
        }
        rule = StalenessRule(
            weights=self.weights,
            replacements=self.replacements,
            batch_size=simulation.batch_size,
            max_batches_ahead=simulation.ahead,
        )
        self.prompter = Prompter(
            outbox=self._questions.outbox(),
            make=self._prompt,
            may_start=rule.wait if self.attached.chooser else None,
            group_ids=self.ledger.unended(None if simulation.dynamic else groups),
            prompted_until=prompted_until,
            **distribution,
        )
        self.generator = GeneratorActor(
            inbox=self._prompts.inbox(),
            outbox=self._rollouts.outbox(),
            rule=rule,
            source=SingleTurn(self.sampler, sampling=Sampling(max_tokens=4), group_size=2),
            ended=self.ledger.ended,
            groups=groups if simulation.dynamic else None,
        )
        self.learner = LearnerActor(
            inbox=self._scored.inbox(),
            updates=[self._updates.outbox()],
            reports=self._reports.outbox(),
            compute=compute,
            policy_learner=cast(Any, self.policy_learner),
            settings=learner_settings(
                batch_size=simulation.batch_size,
                dynamic_sampling_max_ratio=simulation.limit if simulation.dynamic else 0.0,
                max_staleness=1,
            ),
            ledger=self.ledger,
            progress=self.progress,
            replacements=self.replacements,
            logged=Latest[int]("recorded"),
            steps=simulation.steps,
            synchronous=simulation.ahead == 0,
            from_environments=False,
            hooks=self.attached.hooks,
            parts=self.attached.parts.collect,
        )

    def _prompt(self, group_id: int) -> Prompt:
        made = prompt(group_id, (group_id, 7))
        if self.attached.chooser is not None:
            made = replace(made, problem=PROBLEMS[self.attached.chooser.choose(group_id)])
            self.chosen.append((group_id, made.problem))
        return made

    def _serve(self, version: int, step: int) -> None:
        self.engine.version = version
        self.weights.put(WeightsReady(version=version, step=step, fingerprint="f"))

    async def _discard_early(self) -> None:
        """Discard the selected groups before the generator, as an inserted actor does."""
        async with self._questions.inbox() as inbox, self._prompts.outbox() as outbox:
            async for question in inbox:
                discarded_early = self.simulation.discarded_early(question.group_id)
                await outbox.send(
                    Discarded(prompt=question, reason="invalid", detail="no") if discarded_early else question
                )

    async def _score(self) -> None:
        """Score groups with rewards 0 and 1, and discard the zero-variance groups."""
        async with self._rollouts.inbox() as inbox, self._scored.outbox() as outbox:
            async for group in inbox:
                outcome: GroupOutcome
                if isinstance(group, Discarded):
                    outcome = group
                elif self.attached.chooser is not None and group.prompt.problem.type != "useful":
                    rewards = (float(group.prompt.problem.type == "solved"),) * 2
                    outcome = Discarded(prompt=group.prompt, reason="zero_variance", detail="equal", rewards=rewards)
                elif self.simulation.zero_variance(group.prompt.group_id):
                    outcome = Discarded(prompt=group.prompt, reason="zero_variance", detail="equal")
                else:
                    outcome = ScoredGroup(group=group, rewards=(0.0, 1.0), parts={})
                await outbox.send(outcome)

    async def _broadcast(self, watch: Callable[[PolicyUpdated], None]) -> None:
        async for update in self._updates.inbox():
            self.updates.append(update)
            self.attached.parts.take(update.parts)
            whole = self.attached.parts.whole(update.parts)
            self.parts.append({name: Part(value=Raw(encode(part.value))) for name, part in whole.items()})
            watch(update)
            self._serve(update.report.version, update.report.step)

    async def run(self, watch: Callable[[PolicyUpdated], None] = lambda update: None) -> list[StepReport]:
        """Run to the end and return the step reports. `watch` is called with every update before its weights serve."""
        try:
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(receive_all, self._reports.inbox())
                    tasks.start_soon(self._broadcast, watch)
                    for job in (
                        self.learner.run,
                        self._score,
                        self.generator.run,
                        self._discard_early,
                        self.prompter.run,
                    ):
                        tasks.start_soon(job)
        finally:
            self.engine.close()
        return [update.report for update in self.updates]

    def ended(self) -> list[int]:
        """Return the ids of all ended groups in ascending order."""
        return sorted(group_id for update in self.updates for group_id in report_groups(update.report))


def report_groups(report: StepReport) -> list[int]:
    """Return the ids of the groups of a batch."""
    zero_variance = [drop.prompt.group_id for drop in report.discarded]
    return [group.scored.group.prompt.group_id for group in report.trained] + zero_variance


def random_groups(share: float, seed: int = 0) -> Callable[[int], bool]:
    """Select this share of all groups, a function of the seed."""
    return lambda group_id: random.Random(f"{seed}/{group_id}").random() < share
