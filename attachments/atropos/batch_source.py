"""Groups of a run with environments: a running or started Atropos API server, or its mock, and the reader of groups."""

from __future__ import annotations

from attachments.atropos.api import AtroposApi
from attachments.atropos.client import Registration
from attachments.atropos.commands import require_server
from attachments.atropos.mock import MockAtropos
from attachments.atropos.reader import GroupReader, PolicyBounds
from attachments.atropos.validation import Bounds
from protocols.batches import BatchSource
from training_run.profile.schema import AtroposSource, EnvironmentSource, MockSource, Profile, RunningServer
from training_run.run import RunContext


def batch_source(context: RunContext, settings: AtroposSource, *, atropos_url: str) -> BatchSource:
    """The Atropos API server, or its mock."""
    profile, sampling = context.profile, context.profile.sampling
    if isinstance(settings, MockSource):
        server = require_server(profile)
        return MockAtropos(
            context.address,
            api_key=server.api_key,
            make_prompt=context.prompts.prompt,
            first_prompt=context.state.prompted if context.state else 0,
            rewards=context.rewards,
            sampling=sampling,
            batch_size=profile.learner.batch_size,
            max_choices=server.max_choices,
        )
    return AtroposApi(
        atropos_url,
        registration=Registration(
            batch_size=profile.learner.batch_size * sampling.group_size,
            max_token_len=context.max_sequence_tokens + 1,  # the server's bound is exclusive
            checkpoint_dir=str((context.directory.path / "atropos").absolute()),
            save_checkpoint_interval=max(1, profile.checkpoint.interval),
            num_steps=profile.steps,
            wandb_project=profile.tracking.project,
            wandb_group=profile.tracking.group,
        ),
        reset=not isinstance(settings, RunningServer) or settings.reset,
        poll_seconds=settings.poll_seconds,
    )


def group_reader(context: RunContext, settings: AtroposSource) -> GroupReader:
    """The reader that validates groups and looks up how their tokens were sampled."""
    profile, policy = context.profile, context.policy
    return GroupReader(
        sample_log=context.sample_log,
        policy=PolicyBounds(
            bounds=Bounds(vocab_size=policy.vocab_size, context_length=context.max_sequence_tokens),
            decode=policy.tokenizer.decode,
        ),
        recompute=context.recompute_logprobs,
        sampling=profile.sampling,
        learner=profile.learner,
        missing_logprobs=settings.missing_logprobs if isinstance(settings, EnvironmentSource) else "refuse",
    )


def running_url(profile: Profile) -> str:
    """The address of the Atropos API server that the run connects to; empty without one."""
    return profile.atropos.url if isinstance(profile.atropos, RunningServer) else ""
