"""Groups of a run with environments: a running or started Atropos API server, or its mock, and the reader of groups."""

from __future__ import annotations

from msgspec import Raw

from attachments.atropos.api import AtroposApi
from attachments.atropos.client import Registration
from attachments.atropos.commands import require_server
from attachments.atropos.mock import MockAtropos
from attachments.atropos.reader import GroupReader
from attachments.atropos.sample_log import SampleLog, token_cost
from attachments.atropos.sections import ATROPOS, DIRECTORY, AtroposSource, EnvironmentSource, MockSource, RunningServer
from attachments.atropos.validation import Bounds
from protocols.batches import BatchSource, GroupSupply
from training_run.profile.schema import Profile
from training_run.run import RunContext


def group_supply(run: RunContext, settings: AtroposSource, samples: SampleLog, *, server_url: str) -> GroupSupply[Raw]:
    """Return where the groups of a run come from, and how they are read.

    samples: how the tokens of clients were sampled. server_url: address of the Atropos API server; empty for the mock.
    """
    longest = min(run.policy.context_length, settings.max_tokens)
    return GroupSupply(
        source=_batch_source(run, settings, server_url=server_url, longest=longest),
        reader=_group_reader(run, settings, samples, longest=longest),
        poll_seconds=settings.poll_seconds,
        patience_seconds=settings.patience_seconds,
    )


def _batch_source(run: RunContext, settings: AtroposSource, *, server_url: str, longest: int) -> BatchSource[Raw]:
    """The Atropos API server, or its mock. longest: length of a sequence, in tokens."""
    profile, sampling = run.profile, run.profile.sampling
    if isinstance(settings, MockSource):
        server = require_server(profile)
        return MockAtropos(
            run.address,
            api_key=server.api_key,
            make_prompt=run.prompts.prompt,
            first_prompt=run.start.state.prompted if run.start.state else 0,
            rewards=run.rewards,
            sampling=sampling,
            batch_size=profile.learner.batch_size,
            max_choices=server.max_choices,
        )
    return AtroposApi(
        server_url,
        registration=Registration(
            batch_size=profile.learner.batch_size * sampling.group_size,
            max_token_len=longest + 1,  # the server's bound is exclusive
            checkpoint_dir=str((run.directory.path / DIRECTORY).absolute()),
            save_checkpoint_interval=max(1, profile.checkpoint.interval),
            num_steps=profile.steps,
            wandb_project=profile.tracking.project,
            wandb_group=profile.tracking.group,
        ),
        reset=not isinstance(settings, RunningServer) or settings.reset,
        poll_seconds=settings.poll_seconds,
    )


def _group_reader(run: RunContext, settings: AtroposSource, samples: SampleLog, *, longest: int) -> GroupReader:
    """The reader that validates groups and looks up how their tokens were sampled."""
    profile, policy = run.profile, run.policy
    return GroupReader(
        sample_log=samples,
        bounds=Bounds(vocab_size=policy.vocab_size, context_length=longest),
        decode=policy.tokenizer.decode,
        recompute=run.recompute_logprobs,
        sampling=profile.sampling,
        learner=profile.learner,
        missing_logprobs=settings.missing_logprobs if isinstance(settings, EnvironmentSource) else "refuse",
    )


def sample_log(profile: Profile) -> SampleLog:
    """Return an empty sample log for twice the completions that environments may hold, and at least 2^20 tokens."""
    completions = profile.learner.batch_size * profile.sampling.group_size
    completion_tokens = profile.sampling.max_tokens * token_cost(profile.sampling) + 32
    held = (profile.rollouts.max_batches_ahead + 3) * completions * completion_tokens
    return SampleLog(capacity_tokens=max(2**20, 2 * held), logit_bias=profile.sampling.logit_bias)


def running_url(profile: Profile) -> str:
    """The address of the Atropos API server that the run connects to; empty without one."""
    source = ATROPOS.of(profile)
    return source.url if isinstance(source, RunningServer) else ""
