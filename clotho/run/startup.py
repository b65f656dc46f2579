"""What a run is made of before the first actor starts: data, policy, engine, and the state it resumes from.

Like `pipeline.py`, which is its only user, it may import every part of the system.

The problems of a run, as prompts: which group asks which, and which are held out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from msgspec import Struct

from actors.learner import Progress
from clotho.atropos.client import require_address
from clotho.atropos.commands import require_environments
from clotho.config.load import load_profile, write_profile
from clotho.config.resume_compatibility import refuse_if_incompatible
from clotho.config.schema import DataSection, Profile
from clotho.inference import DecodeEngine
from clotho.inference.sampling import validate
from clotho.memory.estimate import estimate_memory
from clotho.memory.report import too_large
from clotho.models.loading import find_model
from clotho.models.machine import limit_buffer_cache, physical_memory, restore_random_state
from clotho.models.policy import Policy, load_policy
from clotho.models.tokenizer import ChatTokenizer
from clotho.monitoring.metrics import RunHistory, read_history
from clotho.rewards.overlong import Overlong
from clotho.rewards.runner import RewardRunner
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.plugins import load_factory
from clotho.storage.checkpoints import (
    LatestCheckpoint,
    dataset_fingerprint,
    latest_checkpoint,
    model_fingerprint,
    read_checkpoint,
    read_state,
    require_same_inputs,
    tokenizer_fingerprint,
)
from clotho.storage.datasets import Columns, HeldOutSplit, ProblemOrder, load_problems, split_heldout
from clotho.storage.jsonl import truncate_after
from clotho.storage.run_directory import RunDirectory
from clotho.training.ledger import Ledger
from clotho.training.update import PolicyLearner
from clotho.training.warmup_step import rehearse
from protocols.checkpoint import RunState
from protocols.errors import CheckpointError, ModelError, ProfileError, RequestError
from protocols.evaluation import HeldOut
from protocols.prompt import Problem, Prompt, group_seed
from protocols.sampling import SampleRequest, restricts_support
from protocols.step import ReplayGroup
from protocols.summary import MemoryEstimate

SHOWN = 10
"""Kinds of problems that a complaint lists."""


class PromptBuilder:
    """Makes the prompt of every group: a pure function of (dataset, seed, group_id)."""

    def __init__(
        self, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], *, seed: int, shuffle: bool
    ) -> None:
        """prompts: the rendered problems, index by index."""
        self._problems, self._prompts, self._seed = problems, prompts, seed
        self._order = ProblemOrder(len(problems), seed=seed, shuffle=shuffle)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._prompts))

    def prompt(self, group_id: int) -> Prompt:
        """The prompt that group `group_id` asks."""
        index = self._order.index(group_id)
        return Prompt(
            group_id=group_id,
            problem=self._problems[index],
            tokens=self._prompts[index],
            seed=group_seed(self._seed, group_id),
        )


def load_prompts(
    profile: Profile, tokenizer: ChatTokenizer, is_correct: Callable[[Problem, str], Awaitable[bool | None]]
) -> tuple[PromptBuilder, HeldOut]:
    """Read, split and render a profile's problems.

    Raises DatasetError, ModelError if they cannot be rendered, ProfileError for a reward that is for none of them.
    """
    split = _split(profile.data, profile.seed)
    _refuse_idle_rewards(profile, {problem.type for problem in (*split.train, *split.heldout)})
    train, held_out = (_render(problems, profile.data.system, tokenizer) for problems in (split.train, split.heldout))
    return (
        PromptBuilder(split.train, train, seed=profile.seed, shuffle=profile.data.shuffle),
        HeldOut(problems=split.heldout, prompts=held_out, is_correct=is_correct),
    )


def _refuse_idle_rewards(profile: Profile, kinds: set[str]) -> None:
    for reward in profile.rewards:
        if reward.types and kinds.isdisjoint(reward.types):
            raise ProfileError(
                f"rewards: {reward.name} is for problems of type {', '.join(reward.types)}, and {profile.data.train} "
                f"has none; there are: {', '.join(sorted(kinds)[:SHOWN])}"
            )


def _split(data: DataSection, seed: int) -> HeldOutSplit:
    columns = Columns(
        prompt=data.prompt_key, answer=data.answer_key, type=data.type_key, default_type=data.default_type
    )
    problems = load_problems(data.train, columns=columns)
    if not data.heldout:
        return split_heldout(problems, data.heldout_fraction, seed)
    return HeldOutSplit(train=tuple(problems), heldout=tuple(load_problems(data.heldout, columns=columns)))


def _render(problems: Sequence[Problem], system: str, tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    opening = [{"role": "system", "content": system}] if system else []
    try:
        return [tokenizer.render_chat([*opening, {"role": "user", "content": problem.prompt}]) for problem in problems]
    except RequestError as error:
        raise ModelError(f"the model's chat template cannot render the problems: {error}") from error


class Components(Struct, frozen=True, kw_only=True):
    """Everything the actors are wired to.

    engine_broken: has an error if a decode tick raises. state: what the run resumes from, if it does, and history: what
    its earlier lives have measured. base: the parameters before the first update, where those lives did not get round
    to measuring them. replay: groups in the replay buffer it resumes with. estimated_memory: bytes
    of arrays at the fullest moment, as worked out before. warnings: of damaged checkpoints.
    """

    profile: Profile
    directory: RunDirectory
    executor: ComputeExecutor
    policy: Policy
    engine: DecodeEngine
    engine_broken: Future[None]
    policy_learner: PolicyLearner
    questions: PromptBuilder
    held_out: HeldOut
    rewards: RewardRunner
    ledger: Ledger
    progress: Progress
    inputs: dict[str, str]
    state: RunState | None
    history: RunHistory
    base: Any | None
    replay: tuple[ReplayGroup, ...]
    estimated_memory: int
    warnings: tuple[str, ...]

    @property
    def resumed_from(self) -> int | None:
        """The step of the checkpoint that the run resumes from; 0 if it has none yet; None for a new run."""
        if self.state is not None:
            return self.state.step
        return 0 if self.directory.resumed else None


async def assemble(profile: Profile, directory: RunDirectory, executor: ComputeExecutor) -> Components:
    """Load and check everything a run needs, in the order in which mistakes are cheapest to find; then take it over.

    Raises the errors of `protocols.errors`, one line each, before anything has been trained; and before anything in the
    run directory has been changed, unless it is the directory itself that is wrong.
    """
    _require_what_is_elsewhere(profile)
    rewards = _rewards(profile)
    policy, policy_learner, engine, estimate = await finish(executor.submit(lambda: _prepare_compute(profile)))
    rehearsal = executor.submit(lambda: rehearse(policy_learner, profile, context=policy.context_length))
    broken = executor.attach(engine)
    questions, held_out = await run_sync(lambda: _questions(profile, policy, rewards))
    ungraded = _require_correct_rewards(profile, held_out, rewards)
    inputs = await run_sync(lambda: _inputs(profile))
    await finish(rehearsal)
    if directory.resumed and directory.profile.exists():
        refuse_if_incompatible(load_profile(str(directory.profile)), profile, written=directory.profile)
    directory.begin()
    base = policy.trainable()
    found = latest_checkpoint(directory.checkpoints) if directory.resumed else LatestCheckpoint(path=None, warnings=())
    state: RunState | None = None
    replay: tuple[ReplayGroup, ...] = ()
    if found.path is not None:
        state, replay = await _resume(found.path, executor, policy, policy_learner, inputs)
    for lines in (directory.metrics, directory.evaluations, directory.rollouts):
        truncate_after(lines, state.step if state else -1)
    write_profile(profile, directory.profile)
    history = read_history(directory.metrics, directory.evaluations)
    return Components(
        profile=profile,
        directory=directory,
        executor=executor,
        policy=policy,
        engine=engine,
        engine_broken=broken,
        policy_learner=policy_learner,
        questions=questions,
        held_out=held_out,
        rewards=rewards,
        ledger=Ledger(state.ledger if state else None),
        progress=_progress(state),
        inputs=inputs,
        state=state,
        history=history,
        base=base if state and not history.before else None,
        replay=replay,
        estimated_memory=estimate.total,
        warnings=(*ungraded, *found.warnings),
    )


def _require_what_is_elsewhere(profile: Profile) -> None:
    """Actors of the user's own, and the interpreter and scripts of environments."""
    for section in profile.actors:
        load_factory(section)
    require_environments(profile)
    if profile.atropos.url:
        require_address(profile.atropos.url)


def _prepare_compute(profile: Profile) -> tuple[Policy, PolicyLearner, DecodeEngine, MemoryEstimate]:
    limit_buffer_cache(profile.monitor.cache_limit_mb * 2**20)
    find_model(profile.model.path)
    estimate = estimate_memory(profile.model, profile)
    if refusal := too_large(estimate, physical_memory()):
        raise refusal
    keep_reference = profile.learner.kl_beta > 0 and profile.learner.reference == "base"
    policy = load_policy(profile.model, profile.policy, seed=profile.seed, keep_reference=keep_reference)
    learner = PolicyLearner(
        policy,
        profile.learner,
        profile.sampling,
        steps=profile.steps,
        seed=profile.seed,
        good_window=profile.collapse_detection.window if profile.collapse_detection.on_collapse == "rollback" else 0,
        watched=profile.collapse_detection.on_collapse != "off",
    )
    return policy, learner, DecodeEngine(policy, profile.engine), estimate


def _rewards(profile: Profile) -> RewardRunner:
    learner, overlong = profile.learner, None
    if learner.overlong_buffer:
        overlong = Overlong(
            max_tokens=profile.sampling.max_tokens, buffer=learner.overlong_buffer, penalty=learner.overlong_penalty
        )
    within_group = learner.advantage not in ("batch", "environment")
    return RewardRunner(profile.rewards, overlong=overlong, keep_zero_variance=not within_group)


def _questions(profile: Profile, policy: Policy, rewards: RewardRunner) -> tuple[PromptBuilder, HeldOut]:
    """All problems, none of which is too long."""
    questions, held_out = load_prompts(profile, policy.tokenizer, rewards.is_correct)
    longest = max(questions.longest_prompt, held_out.longest_prompt)
    _refuse_long_prompts(longest, policy.context_length, profile)
    _refuse_other_sampling(longest, policy, profile)
    return questions, held_out


def _refuse_long_prompts(longest: int, context: int, profile: Profile) -> None:
    if longest >= context:
        raise ProfileError(
            f"the longest prompt of {profile.data.train} and its held-out problems has {longest} tokens, and the "
            f"policy's context is {context}: shorten it, or choose another model"
        )


def _refuse_other_sampling(longest: int, policy: Policy, profile: Profile) -> None:
    """What the engine would refuse of every group: its own check, on a prompt as long as the longest."""
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


def _inputs(profile: Profile) -> dict[str, str]:
    model = find_model(profile.model.path)
    files = [Path(name).expanduser() for name in (profile.data.train, profile.data.heldout) if name]
    return {
        "model": model_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(model),
        "dataset": dataset_fingerprint(*files),
    }


def _require_correct_rewards(profile: Profile, held_out: HeldOut, rewards: RewardRunner) -> tuple[str, ...]:
    """Return a warning for each type of held-out problem that no reward with `correct = true` is listed for.

    Raises ProfileError if no held-out problem has such a reward.
    """
    if not profile.eval.enabled:
        return ()
    types = {problem.type for problem in held_out.problems}
    missing = rewards.types_without_correct(types)
    if missing and len(missing) == len(types):
        raise ProfileError(
            f"rewards: no reward with correct = true applies to the held-out problems, which have the types "
            f"{', '.join(missing[:SHOWN])}: add such a reward, or set eval.enabled = false"
        )
    return tuple(
        f"no reward with correct = true applies to held-out problems of type {kind}: they count as ungraded"
        for kind in missing[:SHOWN]
    )


async def _resume(
    path: Path, executor: ComputeExecutor, policy: Policy, learner: PolicyLearner, inputs: dict[str, str]
) -> tuple[RunState, tuple[ReplayGroup, ...]]:
    """Bring policy, learner and random numbers to where a checkpoint stands."""
    state = read_state(path)
    require_same_inputs(state, inputs)
    return state, await finish(executor.submit(lambda: _restore(path, policy, learner)))


def _progress(state: RunState | None) -> Progress:
    if state is None:
        return Progress()
    return Progress(
        step=state.step,
        bad_steps=state.bad_steps,
        train_seconds=state.train_seconds,
        trained_tokens=state.trained_tokens,
    )


def _restore(path: Path, policy: Policy, learner: PolicyLearner) -> tuple[ReplayGroup, ...]:
    checkpoint = read_checkpoint(path, expected=policy.trainable(), adapter_config=policy.adapter_config)
    state = checkpoint.state
    policy.publish(checkpoint.parameters, version=state.version, step=state.step, fingerprint=state.fingerprint)
    try:
        learner.restore(checkpoint.optimizer)
    except ValueError as error:
        raise CheckpointError(f"cannot resume from {path}: {error}") from error
    restore_random_state(state.random_state)
    return checkpoint.replay
