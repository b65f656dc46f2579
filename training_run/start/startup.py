"""Start-up: checks the profile, loads data and policy, resumes, and builds the run's context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import structlog
from anyio.to_thread import run_sync
from msgspec import Struct, field, structs

from clotho.extension import Door, attachment_names
from clotho.inference.decoding import LONGEST_PART
from clotho.inference.sampling import validate
from clotho.lanes.arbiter import Lane
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.loading import find_model
from clotho.models.model_files import model_fingerprint, tokenizer_fingerprint
from clotho.models.policy import Policy, load_policy
from clotho.sampler import OwnThreads, Sampler
from clotho.serving.struct_types import prepare_struct_types
from clotho.settings.bounds import Off
from clotho.settings.learner import BaseReference
from clotho.training.gradient import OtherRanks
from clotho.training.optimizers import PLAIN, StepRule
from clotho.training.update import PolicyLearner
from protocols.checkpoint import Origin, RunState
from protocols.errors import ProfileError, RequestError
from protocols.evaluation import HeldOut
from protocols.finding import Finding
from protocols.sampling import SampleRequest, restricts_support
from protocols.summary import MemoryEstimate
from training_run.attached import Attached
from training_run.directory.best_checkpoint import INITIAL, BestCheckpointKeeper
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import checkpoint_path, checkpoint_steps
from training_run.directory.run_directory import RunDirectory
from training_run.groups.ledger import Ledger
from training_run.groups.order import HeldOutSplit
from training_run.groups.progress import LearnerProgress, RunWeights
from training_run.groups.prompts import MAX_LISTED_TYPES, LoadedPrompts, dataset_warnings, load_prompts, read_split
from training_run.memory.estimate import estimate_memory
from training_run.memory.report import limit_memory
from training_run.profile.load import write_profile
from training_run.profile.rules import has_own_groups
from training_run.profile.schema import HeldOutEvaluation, Profile
from training_run.records.evaluation_history import RunHistory, read_history
from training_run.records.findings import RunFindings
from training_run.records.remedies import RunCommands
from training_run.rewards.runner import RewardRunner, expectations, rewards_of
from training_run.run import RunContext
from training_run.stages import recorded_profile
from training_run.start.preflight import require_importable, start_findings, write_findings
from training_run.start.starting_point import Fork, begin, publish_first_checkpoint, publish_fork, restore_learner
from training_run.start.warmup_step import run_warmup_step
from training_run.supervision.latest import Latest
from training_run.supervision.watchdog import StartupWatch
from training_run.update_values import TokenRecord, UpdateKl

if TYPE_CHECKING:
    from clotho.models.tokenizer import ChatTokenizer
    from protocols.prompt import Problem
    from training_run.rewards.worker_process import NewWorker

log = structlog.get_logger(actor="pipeline")


class Plan(Struct, kw_only=True, eq=False):
    """Start-up -> attachments, before the policy is loaded. What an attachment sets decides how the run is loaded.

    ending: closed when the run ends, also if its start fails; last in, first out. token_values: updates return the
    values of their tokens; may be set, and is never cleared. measured_updates: of so many updates in a row it is
    measured how far they move the policy; may be raised. ranks: compute shares of every gradient; None: this process
    computes them alone. workers: what starts the workers of rewards, by the value of `rewards.where`. learns_equal:
    groups with equal rewards are trained on, because there is more to learn from than rewards; may be set.
    rule: of optimizer steps; None: that of the optimizer alone. checks: of the tokenizer and all problems, before the
    run directory changes; raise the errors of `protocols.errors`.
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
    checks: list[Callable[[ChatTokenizer, Sequence[Problem]], None]] = field(default_factory=list)


Attach = Callable[[RunContext], Awaitable[None]]
"""Completes a run that is loaded, before its first actor is constructed: it adds to `run.attached`."""

PREPARE: Door[[Plan], Awaitable[Attach | None]] = Door("attachment.prepare")
"""Begins what must exist before the policy is loaded. None: the run does not use the attachment."""


async def build_context(
    profile: Profile,
    directory: RunDirectory,
    compute: Compute,
    ending: ExitStack,
    *,
    address: str = "",
    slow_seconds: float = 120.0,
) -> RunContext:
    """Load and check all inputs of a run, cheap checks first; then lock the run directory.

    ending: receives what must be closed at the end of the run, or after a failed start. address: base URL of the HTTP
    server. slow_seconds: a phase that takes longer is reported.
    Raises the errors of `protocols.errors`. The run directory is unchanged unless the directory itself is the problem.
    """
    watch = startup_watch(slow_seconds)
    plan = Plan(profile=profile, directory=directory, ending=ending)
    prepared = [await prepare(plan) for prepare in PREPARE.functions]
    with watch.phase("custom actors and rewards"):
        require_importable(profile)
        rewards = rewards_of(profile, workers=plan.workers, learns_equal=plan.learns_equal)
        ending.callback(rewards.close)
    prepare_struct_types()
    context = await _build_context(plan, compute, rewards, watch, address=address)
    for attach in filter(None, prepared):
        await attach(context)
    return context


def startup_watch(slow_seconds: float) -> StartupWatch:
    """Return the watch that logs a phase of the start when it takes longer than `slow_seconds`."""
    return StartupWatch(limit_seconds=slow_seconds, on_slow=_report_slow)


def _report_slow(phase: str, seconds: float, hint: str) -> None:
    log.warning("start_takes_long", phase=phase, seconds=round(seconds), hint=hint)


async def _build_context(
    plan: Plan,
    compute: Compute,
    rewards: RewardRunner,
    watch: StartupWatch,
    *,
    address: str,
) -> RunContext:
    profile, directory = plan.profile, plan.directory
    with watch.phase("problems"):  # before the model, because large models take minutes
        split = await run_sync(read_split, profile)
    loading = compute.learner.submit(lambda: _load_policy(plan, compute.learner.lane))
    with watch.phase("worker processes of rewards"):
        await rewards.start(compute)
    with watch.phase("model and tokenizer"):
        ready = await finish(loading)
        policy, policy_learner = ready.policy, ready.learner
        sampler = await run_sync(_make_sampler, profile, policy, compute)
    warmup = compute.learner.submit(lambda: run_warmup_step(policy_learner, profile, context=policy.context_length))
    with watch.phase("prompts"):
        loaded = await run_sync(lambda: _load_prompts(split, profile, policy, rewards))
        prompts, held_out = loaded.builder, loaded.held_out
        ungraded = _require_correct_rewards(profile, held_out, rewards)
        inputs = await run_sync(_fingerprint_inputs, profile, loaded.dataset.fingerprint)
        preflight = await run_sync(start_findings, profile, policy.tokenizer, prompts.problems, ready.estimate)
        for check in plan.checks:
            await run_sync(check, policy.tokenizer, [*prompts.problems, *held_out.problems])
    slow = [f"{one.fact}; {one.advice}" for one in preflight if one.name in ("slow_blas", "slow_quantized")]
    with watch.phase("warmup step", *slow[:1]):
        await finish(warmup)
    with watch.phase("checkpoint and histories"):
        fork, origin = ready.fork, ready.origin
        start = await begin(
            profile, directory, compute, policy, policy_learner, fork=fork, origin=origin, inputs=inputs
        )
        write_profile(recorded_profile(profile, directory), directory.profile)
        preflight, findings = _findings(profile, directory, preflight)
        history = read_history(directory.metrics, directory.evaluations)
    ledger = Ledger(start.state.ledger if start.state else None)
    weights = RunWeights()
    weights.put(sampler.served)
    return RunContext(
        profile=profile,
        directory=directory,
        policy=policy,
        sampler=sampler,
        policy_learner=policy_learner,
        prompts=prompts,
        held_out=held_out,
        rewards=rewards,
        inputs=inputs,
        start=structs.replace(
            start,
            initial=start.initial if start.state and not history.before else None,
            warnings=(*dataset_warnings(loaded), *ungraded, *start.warnings, *unknown_parts(start.parts)),
            findings=preflight,
        ),
        history=history,
        memory=ready.estimate,
        attached=Attached(ending=plan.ending, parts=CheckpointParts(start.parts)),
        address=address,
        ledger=ledger,
        progress=_progress(start.state, ledger, batch_size=profile.learner.batch_size),
        weights=weights,
        logged=Latest[int]("logged"),
        findings=findings,
        best=_best_checkpoint(profile, directory, history, findings),
    )


def _findings(
    profile: Profile, directory: RunDirectory, findings: tuple[Finding, ...]
) -> tuple[tuple[Finding, ...], RunFindings]:
    """Return the findings of the start with their commands, which the run directory records too, and of the run."""
    commands = RunCommands(directory.path)
    completed = tuple(map(commands.complete, findings))
    write_findings(directory.preflight, completed)
    reported = [finding.name for finding in completed]
    return completed, RunFindings(expectations(profile.rewards), reported=reported, complete=commands.complete)


def _best_checkpoint(
    profile: Profile,
    directory: RunDirectory,
    history: RunHistory,
    findings: RunFindings,
) -> BestCheckpointKeeper:
    interval = profile.eval.interval if isinstance(profile.eval, HeldOutEvaluation) else 0
    return BestCheckpointKeeper(
        checkpoints=directory.checkpoints,
        marker=directory.best,
        reports=lambda: [*history.evaluations, *history.reports],
        is_evaluated=lambda step: interval > 0 and step % interval == 0,
        named=lambda: findings.named_checkpoints,
    )


class LoadedPolicy(NamedTuple):
    """What the learner's thread loads. fork: the checkpoint of another run with which the run starts.

    origin: the adapter that was read; None without one, or if the first checkpoint of the run has its weights.
    """

    policy: Policy
    learner: PolicyLearner
    estimate: MemoryEstimate
    fork: Fork | None
    origin: Origin | None


def _load_policy(plan: Plan, lane: Lane) -> LoadedPolicy:
    profile, directory = plan.profile, plan.directory
    find_model(profile.model.path)
    starts_from_adapter = bool(profile.policy.adapter) and directory.fork is None
    from_checkpoint = starts_from_adapter and directory.resumed and INITIAL in checkpoint_steps(directory.checkpoints)
    initial = None
    if starts_from_adapter and not from_checkpoint:
        from training_run.start.initial_adapter import publish_initial, read_initial  # the formats of adapters

        initial = read_initial(profile.policy.adapter, profile.model.path)
    estimate = estimate_memory(profile.model, profile)
    limit_memory(estimate, profile.memory)
    keep_reference = isinstance(profile.learner.reference, BaseReference)
    policy = load_policy(profile.model, profile.policy, seed=profile.seed, keep_reference=keep_reference)
    fork = publish_fork(policy, directory.fork) if directory.fork else None
    if initial is not None:
        publish_initial(policy, initial)
    elif from_checkpoint:
        publish_first_checkpoint(policy, checkpoint_path(directory.checkpoints, INITIAL))
    first_step = directory.stage.first_step if directory.stage is not None else 0
    learner = PolicyLearner(
        policy,
        profile.learner,
        profile.sampling,
        steps=profile.steps - first_step,
        first_step=first_step,
        seed=profile.seed,
        measure=UpdateKl(plan.measured_updates),
        recorder=TokenRecord if plan.token_values else None,
        ranks=plan.ranks,
        lane=lane,
        rule=plan.rule or PLAIN,
    )
    if fork is not None:
        fork = restore_learner(learner, fork)
    return LoadedPolicy(policy, learner, estimate, fork, initial.origin if initial else None)


def _make_sampler(profile: Profile, policy: Policy, compute: Compute) -> Sampler:
    turn_seconds = profile.learner.max_turn_ms / 1000.0
    return Sampler(
        policy,
        threads=OwnThreads(
            compute=compute,
            settings=profile.engine,
            adapters=None if isinstance(profile.server, Off) else profile.server.adapters,
            prefill_seconds=min(turn_seconds, LONGEST_PART),
            scoring_seconds=turn_seconds,
        ),
    )


def _load_prompts(split: HeldOutSplit, profile: Profile, policy: Policy, rewards: RewardRunner) -> LoadedPrompts:
    """The prompts of the run, checked against the context length and the engine's limits."""
    sure = min(policy.context_length, profile.engine.kv_cache_tokens) - profile.sampling.max_tokens
    loaded = load_prompts(split, profile, policy.tokenizer, rewards.grade, longest=sure, say=log.warning)
    held_out, longest, context = loaded.held_out, loaded.longest, policy.context_length
    if has_own_groups(profile):
        rewards.require_columns([*loaded.builder.problems, *held_out.problems])
    if longest >= context:
        raise ProfileError(
            f"the longest prompt of {profile.data.train} and its held-out problems has {longest} tokens, and the "
            f"policy's context length is {context}: set data.max_prompt_tokens, or choose another model"
        )
    _require_valid_requests(longest, policy, profile)
    if isinstance(profile.eval, HeldOutEvaluation) and profile.eval.problems > len(held_out.problems):
        log.warning(
            "fewer_heldout_problems_than_requested",
            key="eval.problems",
            requested=profile.eval.problems,
            available=len(held_out.problems),
        )
    return loaded


def _require_valid_requests(longest: int, policy: Policy, profile: Profile) -> None:
    """Raise ProfileError if the engine would refuse the longest prompt with the profile's sampling parameters."""
    limit = profile.engine.kv_cache_tokens
    request = SampleRequest(
        prompt=(0,) * longest,
        sampling=profile.sampling,
        seeds=(0,),
        record_support=restricts_support(profile.sampling),
    )
    try:
        validate(request, vocabulary=policy.vocab_size, context=policy.context_length, cache_tokens=limit)
    except RequestError as error:
        raise ProfileError(
            f"sampling.{error.param}: {error} (the longest prompt has {longest} tokens, and "
            f"engine.kv_cache_tokens is {limit})"
        ) from error


def _fingerprint_inputs(profile: Profile, dataset: str) -> dict[str, str]:
    model = find_model(profile.model.path)
    tokenizer = tokenizer_fingerprint(model, profile.model.chat_template)
    return {"model": model_fingerprint(model), "tokenizer": tokenizer, "dataset": dataset}


def _require_correct_rewards(profile: Profile, held_out: HeldOut, rewards: RewardRunner) -> tuple[str, ...]:
    """Return a warning for each type of held-out problem that no reward with `correct = true` is listed for.

    Raises ProfileError if no held-out problem has such a reward.
    """
    if isinstance(profile.eval, Off) or not profile.rewards:
        return ()
    types = {problem.type for problem in held_out.problems}
    missing = rewards.types_without_correct(types)
    if missing and len(missing) == len(types):
        raise ProfileError(
            f"rewards: no reward with correct = true applies to the held-out problems, which have the types "
            f'{", ".join(missing[:MAX_LISTED_TYPES])}: add such a reward, or set eval = "off"'
        )
    return tuple(
        f"no reward with correct = true applies to held-out problems of type {kind}: they count as ungraded"
        for kind in missing[:MAX_LISTED_TYPES]
    )


def _progress(state: RunState | None, ledger: Ledger, *, batch_size: int) -> LearnerProgress:
    kept = ("step", "bad_steps", "train_seconds", "trained_tokens")
    progress = LearnerProgress(**{name: getattr(state, name) for name in kept} if state else {})
    progress.replacements.put(ledger.ended - progress.step * batch_size)
    return progress


def unknown_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each part of a checkpoint whose attachment this installation lacks."""
    return tuple(
        f"the checkpoint has state of the attachment '{name}', which this installation lacks: it is dropped"
        for name in sorted(set(names) - set(attachment_names()))
    )
