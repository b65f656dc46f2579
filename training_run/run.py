"""The context of a run: everything that the actors are constructed from. Built once, at start-up."""

from __future__ import annotations

from msgspec import Struct

from clotho.backend import backend
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import GroupSampler
from clotho.models.policy import Policy
from clotho.sampler import Sampler
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.bounds import Off
from clotho.training.update import PolicyLearner
from protocols.evaluation import HeldOut
from protocols.prompt import Prompt
from protocols.rollout import GroupRewards
from protocols.sampling import PromptLogprobs
from protocols.summary import MemoryEstimate
from training_run.attached import Attached
from training_run.directory.best_checkpoint import BestCheckpointKeeper
from training_run.directory.run_directory import RunDirectory
from training_run.groups.ledger import Ledger
from training_run.groups.progress import LearnerProgress, RunWeights, StalenessRule
from training_run.groups.prompts import PromptBuilder
from training_run.groups.rollout_source import RolloutSource, SingleTurn
from training_run.machine import describe_machine
from training_run.profile.data import RewardSection
from training_run.profile.schema import Profile
from training_run.records.display import RunFacts
from training_run.records.evaluation_history import RunHistory
from training_run.records.findings import RunFindings
from training_run.records.forecast import RemainingWork
from training_run.records.terminal_text import relative_path
from training_run.rewards.runner import RewardRunner, expected
from training_run.start.starting_point import StartingPoint
from training_run.supervision.custom_actors import Services
from training_run.supervision.latest import Latest


class RunContext(Struct, frozen=True, kw_only=True, eq=False):
    """Start-up -> wiring. The references are fixed; some of the objects are state that actors share.

    inputs: fingerprints of model, tokenizer and dataset.
    start: where the run starts; `initial` are the parameters before the first update, if they still need to be
    evaluated after a resume. history: what earlier processes of the run recorded. best: finds the best checkpoint.
    memory: estimated peak, in bytes. attached: what the attachments of this installation have added.
    address: base URL of the HTTP server; empty without a server.

    Shared state, with the actor that writes it:
    weights: the served weights (broadcaster). logged: last step in the log files, findings (monitor). progress, ledger:
    of the learner. history.reports: evaluations since the last start (evaluator).
    """

    profile: Profile
    directory: RunDirectory
    policy: Policy
    sampler: Sampler
    policy_learner: PolicyLearner
    prompts: PromptBuilder
    held_out: HeldOut
    rewards: RewardRunner
    inputs: dict[str, str]
    start: StartingPoint
    history: RunHistory
    best: BestCheckpointKeeper
    memory: MemoryEstimate
    address: str
    ledger: Ledger
    progress: LearnerProgress
    weights: RunWeights
    logged: Latest[int]
    findings: RunFindings
    attached: Attached

    @property
    def compute(self) -> Compute:
        """The compute threads."""
        return self.sampler.compute

    @property
    def resumed_from(self) -> int | None:
        """Step of the checkpoint that the run resumes from; 0 without a checkpoint; None for a new run."""
        if self.start.state is not None:
            return self.start.state.step
        return 0 if self.directory.resumed else None

    @property
    def plan(self) -> RemainingWork:
        """What the run still does, for the forecast of its end."""
        settings, steps = self.profile.eval, self.profile.steps
        if isinstance(settings, Off):
            return RemainingWork(steps=steps, evaluates=False)
        return RemainingWork(steps=steps, evaluates=True, interval=settings.interval, between=settings.problems_between)

    @property
    def total_groups(self) -> int:
        """Number of groups in the batches of the whole run."""
        return self.profile.steps * self.profile.learner.batch_size

    @property
    def replaced_groups_limit(self) -> int | None:
        """`total_groups` if groups may be replaced (`learner.objective.dynamic_sampling_max_ratio`), otherwise None."""
        return self.total_groups if self.profile.learner.objective.dynamic_sampling_max_ratio else None

    @property
    def staleness_rule(self) -> StalenessRule:
        """How far rollouts may run ahead of the served weights."""
        return StalenessRule(
            weights=self.weights,
            replacements=self.progress.replacements,
            batch_size=self.profile.learner.batch_size,
            max_batches_ahead=self.profile.max_batches_ahead,
        )

    def choose_prompt(self, group_id: int) -> Prompt:
        """The prompt of a group, with the problem that an attachment chooses if one does."""
        chooser = self.attached.chooser
        return self.prompts.prompt(group_id, None if chooser is None else chooser.choose(group_id))

    @property
    def scoring(self) -> GroupRewards:
        """What scores groups: the rewards, and what attachments wrap around them."""
        found: GroupRewards = self.rewards
        for wrap in self.attached.scoring:
            found = wrap(found)
        return found

    def rollouts(self, sampler: GroupSampler, *, group_size: int) -> RolloutSource:
        """Return what makes groups: completions of prompts, or the episodes of an attachment."""
        if self.attached.episodes is not None:
            return self.attached.episodes.source(sampler, group_size)
        profile = self.profile
        return SingleTurn(
            sampler,
            sampling=profile.sampling,
            group_size=group_size,
            record_routes=profile.learner.router_replay != "off",
        )

    async def recompute_logprobs(self, tokens: tuple[int, ...], temperature: float) -> PromptLogprobs:
        """Log-probabilities of tokens under the run's sampling distribution at a temperature."""
        distribution = SamplingDistribution(temperature, self.profile.sampling.logit_bias)
        return await self.sampler.prompt_logprobs(tokens, distribution=distribution)

    def services(self) -> Services:
        """What custom actors may use."""
        return Services(
            profile=self.profile,
            directory=self.directory.path,
            sampler=self.sampler.client,
            tokenizer=self.policy.tokenizer,
            weights=self.weights,
        )

    def facts(self, *, blas: str) -> RunFacts:
        """The constant part of the display. blas: name of the BLAS library in use."""
        return RunFacts(
            profile=self.directory.path.name,
            model=relative_path(self.profile.model.path),
            machine=describe_machine(blas=blas),
            compute_path=backend().compute_path(blas, decodes=self.sampler.engine.has_row_decoder),
            policy=self.policy.description,
            address=self.address or None,
            run_dir=relative_path(self.directory.path),
            steps=self.profile.steps,
            estimated_memory=self.memory.total,
            resumed_from=self.resumed_from,
            system_message=self.profile.data.system,
            rewards=tuple(map(_described, self.profile.rewards)) if self.attached.groups is None else (),
        )


def _described(reward: RewardSection) -> str:
    """Return weight and name of a reward, and what it expects if that is known."""
    description = f": {text}" if (text := expected(reward)) else ""
    types = f" ({', '.join(reward.types)})" if reward.types else ""
    return f"{reward.weight:g} {reward.name}{types}{description}"
