"""A rehearsal of the first steps: updates whose results are discarded, decode rate, parity, and the forecast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from attachments.doctor.completions import draw
from clotho.extension import Door
from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import GroupSampler
from clotho.models.policy import Policy
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.bounds import Off
from clotho.settings.model import FullMethod
from clotho.training.update import PolicyLearner
from protocols.finding import LOWER_RATE, Change, Finding, Remedy
from protocols.prompt import Prompt
from protocols.rollout import RolloutGroup
from protocols.sampling import Sampling
from protocols.step import UpdateMetrics
from training_run.groups.rollout_source import SingleTurn
from training_run.parity_check import LIMITS, ParityChecker, ParityReport, parity_sample
from training_run.profile.schema import HeldOutEvaluation, Profile
from training_run.start.warmup_step import dummy_batch_size, dummy_groups

REHEARSED: Door[[Profile, Sequence[UpdateMetrics]], Iterable[Finding]] = Door("attachment.rehearsed")
"""Assesses updates that were computed one after another, and discarded."""

RATE_TOKENS = 32
"""Length of the completions with which the decode rate is measured."""

FLOAT32 = Change(key="model.dtype", value="float32")


class Rehearsed(Struct, frozen=True, kw_only=True):
    """Measurements of a rehearsal.

    completion_tokens: mean length. update_seconds: one update of a whole batch. longest_turn_seconds: longest turn of
    the learner.
    """

    completion_tokens: float
    decode_tokens_per_second: float
    update_seconds: float
    longest_turn_seconds: float


async def decode_rate(
    sampler: GroupSampler, prompts: Callable[[int], Prompt], profile: Profile, *, clock: Callable[[], float]
) -> float:
    """Measure the decode rate in tokens per second, with as many sequences as the run decodes at once."""
    size = profile.sampling.group_size
    rows = min(profile.engine.max_num_seqs, profile.learner.batch_size * size)
    sampling: Sampling = replace(
        profile.sampling, max_tokens=min(RATE_TOKENS, profile.sampling.max_tokens), ignore_eos=True, stop=()
    )
    began = clock()
    source = SingleTurn(sampler, sampling=sampling, group_size=min(size, rows))
    groups = await draw(source, [prompts(i) for i in range(-(-rows // size))])
    return sum(completion.length for group in groups for completion in group.completions) / (clock() - began)


def update_time(learner: PolicyLearner, profile: Profile, *, context: int, positions: float) -> float:
    """Measure an update of made-up completions, and return the expected time of an update of `positions` tokens.

    positions: tokens of all completions, and of one prompt per group, because the completions of a group share it.
    """
    size = dummy_batch_size(profile, context=context)
    groups = dummy_groups(profile, size)
    began = time.perf_counter()
    learner.rehearse([(0, groups)], measure_update_kl=True)
    return (time.perf_counter() - began) * positions / (size.tokens * (size.completions + len(groups)))


class Forecast(Struct, frozen=True, kw_only=True):
    """Estimated duration of a run, from a rehearsal.

    seconds: from the first prompt to the end. seconds_per_step: decoding and update of a batch. evaluation_seconds: all
    evaluations. longest_turn_seconds: longest turn of the learner. seconds_least, seconds_most: limits of `seconds`,
    because the number of groups without variance changes while the policy learns: updates leave such groups out, or
    dynamic sampling replaces them.
    """

    seconds: float
    seconds_least: float
    seconds_most: float
    seconds_per_step: float
    decode_tokens_per_second: float
    update_seconds: float
    evaluation_seconds: float
    longest_turn_seconds: float


def forecast(profile: Profile, rehearsed: Rehearsed, *, heldout: int) -> Forecast:
    """Return the expected duration of the run. heldout: number of held-out problems."""
    completions = profile.learner.batch_size * profile.sampling.group_size
    decoding = completions * rehearsed.completion_tokens / rehearsed.decode_tokens_per_second
    per_step = decoding + rehearsed.update_seconds
    evaluated = 0
    if isinstance(profile.eval, HeldOutEvaluation):
        whole = min(profile.eval.problems or heldout, heldout)
        between = min(profile.eval.problems_between or whole, heldout)
        due = (profile.steps - 1) // profile.eval.interval if profile.eval.interval else 0
        evaluated = (2 * whole + due * between) * (1 + profile.eval.samples)
    evaluations = evaluated * rehearsed.completion_tokens / rehearsed.decode_tokens_per_second
    ratio = profile.learner.objective.dynamic_sampling_max_ratio
    least, most = (per_step, ratio * decoding + rehearsed.update_seconds) if ratio > 1 else (decoding, per_step)
    return Forecast(
        seconds=profile.steps * per_step + evaluations,
        seconds_least=profile.steps * least + evaluations,
        seconds_most=profile.steps * most + evaluations,
        seconds_per_step=per_step,
        decode_tokens_per_second=rehearsed.decode_tokens_per_second,
        update_seconds=rehearsed.update_seconds,
        evaluation_seconds=evaluations,
        longest_turn_seconds=rehearsed.longest_turn_seconds,
    )


def rehearsed_steps(profile: Profile) -> tuple[int, ...]:
    """Return the steps whose updates are rehearsed, one after the other: the first, and the first at the full rate."""
    return tuple(step for step in (0, max(1, profile.learner.schedule.warmup_steps)) if step < profile.steps)


def update_findings(rehearsed: Sequence[UpdateMetrics | None], profile: Profile) -> Iterator[Finding]:
    """Yield the findings about updates that were rehearsed one after another. None: an update that was not finite."""
    updates = [metrics for metrics in rehearsed if metrics is not None]
    if len(updates) < len(rehearsed):
        yield Finding(
            name="update_not_finite",
            severity="error",
            fact="loss or gradient of a rehearsed update is not finite",
            consequence="such updates are skipped, so nothing is learned",
            advice='set model.dtype = "float32" or "bfloat16", or lower learner.optimizer.learning_rate',
            remedy=Remedy(action="start", changes=(FLOAT32, *LOWER_RATE.changes)),
        )
        return
    yield from chain(*REHEARSED(profile, updates))


def check_decoding(
    compute: Compute,
    policy: Policy,
    engine: DecodeEngine,
    profile: Profile,
    group: RolloutGroup,
    forcing: TeacherForcing,
) -> ParityReport:
    """Compare the log-probabilities of sampler and learner on a group, in the thread of parity checks.

    forcing: the learner's.
    """
    tokens = 64 if isinstance(profile.parity, Off) else profile.parity.tokens
    checker = ParityChecker(
        policy,
        engine,
        settings=profile.engine,
        learner=profile.learner,
        decode=compute.decode.submit,
        lane=compute.parity.lane,
        forcing=forcing,
    )
    completions = [completion.tokens for completion in group.completions]
    sample = parity_sample(group.prompt.tokens, completions, tokens=tokens)
    return checker.check(sample, policy.trainable(), temperature=profile.sampling.temperature, tokens=tokens)


def parity_findings(report: ParityReport, profile: Profile, dtype: str) -> Iterator[Finding]:
    """Yield a finding if the log-probabilities differ. dtype: type that the model computes in."""
    usual = LIMITS.get(dtype, LIMITS["bfloat16"])
    limit = usual.stop_kl if isinstance(profile.parity, Off) else profile.parity.stop_kl or usual.stop_kl
    if not report.mean_kl <= limit:
        full = isinstance(profile.policy.method, FullMethod)
        yield Finding(
            name="parity_differs",
            severity="error",
            fact=f"the log-probabilities of sampler and learner differ by a mean KL divergence of {report.mean_kl:.3g} "
            f"nats (limit {limit:g})",
            consequence="the run ends at its first parity check, because the served policy is not the trained policy",
            advice='set model.dtype = "float32"' + ("" if full else ", or check the scale of policy.adapter"),
            remedy=Remedy(action="start", changes=(FLOAT32,)),
        )
