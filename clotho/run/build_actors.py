"""Each box with everything it needs but its ends, which the wiring hands it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from actors.atropos_fetcher import AtroposFetcher
from actors.broadcaster import Broadcaster
from actors.checkpointer import Checkpointer
from actors.evaluator import Evaluator, Pinned
from actors.generator import Generator
from actors.learner import Learner
from actors.monitor import Monitor
from actors.prompter import Prompter
from actors.scorer import Scorer
from clotho.atropos.api import AtroposApi
from clotho.atropos.client import Registration
from clotho.atropos.mock import MockAtropos
from clotho.atropos.reader import GroupReader
from clotho.atropos.reader import Policy as PolicyBounds
from clotho.atropos.source import GroupSource
from clotho.atropos.validation import Bounds
from clotho.monitoring.collapse_detection import CollapseMonitor
from clotho.run.context import RunContext
from clotho.run.startup import Components
from clotho.runtime.compute_thread import finish
from clotho.storage.jsonl import JsonlWriter
from clotho.training.replay import ReplayBuffer
from protocols.collapse import CollapseState


def prompter(parts: Components, session: RunContext) -> Callable[..., Prompter]:
    """Asks every group of the run that has not ended yet, and others in place of those that taught nothing."""
    profile, bound = parts.profile, _bound(parts)
    return partial(
        Prompter,
        make=parts.questions.prompt,
        group_ids=parts.ledger.unended(None if bound else profile.steps * profile.learner.batch_size),
        batch_size=profile.learner.batch_size,
        prompted_until=parts.state.prompted if parts.state else 0,
        refills=session.refills,
        ended=parts.ledger.ended,
        groups=bound,
    )


def generator(parts: Components, session: RunContext) -> Callable[..., Generator]:
    """Has the policy answer, as far ahead of the learner as the profile allows."""
    profile = parts.profile
    return partial(
        Generator,
        weights=session.weights,
        sampler=session.sampler,
        sampling=profile.sampling,
        group_size=profile.sampling.group_size,
        batch_size=profile.learner.batch_size,
        max_batches_ahead=profile.rollouts.max_batches_ahead if profile.asynchronous else 0,
        refills=session.refills,
        ended=parts.ledger.ended,
        groups=_bound(parts),
    )


def _bound(parts: Components) -> int | None:
    """Groups that count towards a batch, where others may be asked in place of those that do not; else None."""
    profile = parts.profile
    return profile.steps * profile.learner.batch_size if profile.learner.dynamic_sampling else None


def atropos_fetcher(parts: Components, session: RunContext) -> Callable[..., AtroposFetcher]:
    """Takes what environments send, in the place of those three."""
    profile, state = parts.profile, parts.state
    policy, learner = parts.policy, profile.learner
    reader = GroupReader(
        sample_log=session.sampled,
        policy=PolicyBounds(
            bounds=Bounds(vocab_size=policy.vocab_size, context_length=_longest(parts)),
            decode=policy.tokenizer.decode,
        ),
        recompute=session.recompute_logprobs,
        sampling=profile.sampling,
        learner=learner,
        settings=profile.atropos,
    )
    return partial(
        AtroposFetcher,
        source=_group_source(parts, session),
        reader=reader,
        weights=session.weights,
        refills=session.refills,
        first_group=state.prompted if state else 0,
        received=state.received if state else {},
        lost=state.in_flight if state else {},
        ended=parts.ledger.ended,
        groups=profile.steps * learner.batch_size,
        batch_size=learner.batch_size,
        max_batches_ahead=profile.rollouts.max_batches_ahead,
        settings=profile.atropos,
    )


def _group_source(parts: Components, session: RunContext) -> GroupSource:
    profile, sampling = parts.profile, parts.profile.sampling
    if profile.atropos.mock:
        return MockAtropos(
            session.address,
            api_key=profile.server.api_key,
            make_prompt=parts.questions.prompt,
            first_prompt=parts.state.prompted if parts.state else 0,
            rewards=parts.rewards,
            sampling=sampling,
            batch_size=profile.learner.batch_size,
            max_choices=profile.server.max_choices,
        )
    return AtroposApi(
        session.atropos_url,
        registration=Registration(
            batch_size=profile.learner.batch_size * sampling.group_size,
            max_token_len=_longest(parts) + 1,  # the server's bound is exclusive
            checkpoint_dir=str((parts.directory.path / "atropos").absolute()),
            save_checkpoint_interval=max(1, profile.checkpoint.interval),
            num_steps=profile.steps,
        ),
        reset=profile.atropos.reset,
        poll_seconds=profile.atropos.poll_seconds,
    )


def _longest(parts: Components) -> int:
    """Tokens of the longest sequence that environments may send."""
    return min(parts.policy.context_length, parts.profile.atropos.max_tokens)


def scorer(parts: Components) -> Callable[..., Scorer]:
    """Rewards completions."""
    return partial(Scorer, rewards=parts.rewards)


def learner(parts: Components, session: RunContext) -> Callable[..., Learner]:
    """Computes the next policy."""
    profile, state = parts.profile, parts.state
    return partial(
        Learner,
        executor=parts.executor,
        policy_learner=parts.policy_learner,
        settings=parts.profile.learner,
        ledger=parts.ledger,
        progress=parts.progress,
        refills=session.refills,
        recorded=session.recorded,
        replay=ReplayBuffer(profile.replay, seed=profile.seed, kept=parts.replay),
        collapse=CollapseMonitor(
            profile.collapse_detection,
            state=state.collapse if state else CollapseState(),
            rollbacks=state.rollbacks if state else 0,
        ),
        steps=profile.steps,
        rounds=not profile.asynchronous,
        unasked=profile.atropos.enabled,
    )


def broadcaster(parts: Components, session: RunContext) -> Callable[..., Broadcaster]:
    """Puts it in service."""
    return partial(
        Broadcaster,
        weights=session.weights,
        executor=parts.executor,
        policy=parts.policy,
        engine=parts.engine,
        settings=parts.profile.parity,
        kv_policy=parts.profile.engine.kv_policy,
        temperature=parts.profile.sampling.temperature,
        probe_prompt=parts.questions.prompt(0).tokens,
    )


def checkpointer(parts: Components, session: RunContext) -> Callable[..., Checkpointer]:
    """Keeps it."""
    settings, directory = parts.profile.checkpoint, parts.directory
    elsewhere = [Path(settings.adapter_path).expanduser()] if settings.adapter_path else []
    return partial(
        Checkpointer,
        directory=directory.checkpoints,
        adapter_directories=[directory.adapters, *elsewhere],
        adapter_config=parts.policy.adapter_config,
        run_id=directory.run_id,
        settings=settings,
        state=session.run_state,
        recorded=session.recorded,
        parameters=parts.policy_learner.parameters,
        loadable=lambda parameters: finish(parts.executor.submit(lambda: parts.policy.loadable(parameters))),
    )


def evaluator(parts: Components) -> Callable[..., Evaluator]:
    """Measures it on problems that it never learns from."""
    profile, learned = parts.profile, parts.policy_learner
    measured = parts.history.after is not None and parts.history.after.step == parts.progress.step
    start = Pinned(step=parts.progress.step, version=learned.version, parameters=learned.parameters, final=measured)
    unmeasured = None if parts.base is None else Pinned(step=0, version=0, parameters=parts.base)
    return partial(
        Evaluator,
        executor=parts.executor,
        policy=parts.policy,
        held_out=parts.held_out,
        sampling=profile.sampling,
        settings=profile.eval,
        generator=profile.engine,
        base=start if start.step == 0 else unmeasured,
        start=start,
        steps=profile.steps,
    )


def monitor(parts: Components, session: RunContext) -> Callable[..., Monitor]:
    """Writes and shows how the run stands."""
    settings, directory = parts.profile.monitor, parts.directory
    return partial(
        Monitor,
        gauges=session.gauges,
        display=session.display,
        metrics=JsonlWriter(directory.metrics),
        evaluations=JsonlWriter(directory.evaluations),
        rollouts=JsonlWriter(directory.rollouts) if settings.rollouts else None,
        recorded=session.recorded,
        first_step=parts.progress.step,
        seconds_before=session.seconds_before,
    )
