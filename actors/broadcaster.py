"""Broadcaster -> generator, server: serves the newest weights, and checks parity between sampler and learner."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Generator

import anyio
import structlog
from anyio.abc import TaskStatus

from clotho.config.schema import KvPolicy, ParityCheck, ParitySection
from clotho.inference import DecodeEngine
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.models.turns import TurnBudget
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.latest import Latest
from clotho.scoring.parity_check import (
    LIMITS,
    SERVED_KL,
    ParityLimits,
    ParityReport,
    ParitySample,
    check_parity,
    parity_sample,
)
from clotho.scoring.teacher_forcing import TeacherForcing
from protocols.errors import ParityError
from protocols.queues import Inbox
from protocols.step import PolicyUpdated, StepReport, WeightsReady

log = structlog.get_logger(actor="broadcaster")

SWAPS_KEPT = 4096


class SwapTimes:
    """Durations of the weight swaps since the last start, in seconds; None before the first swap.

    count: number of swaps; median and longest are those of the last `SWAPS_KEPT`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seconds: deque[float] = deque(maxlen=SWAPS_KEPT)
        self._ended: deque[float] = deque(maxlen=SWAPS_KEPT)

    def add(self, seconds: float) -> None:
        """Record a swap that ends now."""
        self.count += 1
        self._seconds.append(seconds)
        self._ended.append(time.monotonic())

    def ended_after(self, count: int) -> list[float]:
        """Return when the swaps after the first `count` ended, in seconds of `monotonic`."""
        return list(self._ended)[-(self.count - count) :] if self.count > count else []

    @property
    def last(self) -> float | None:
        """Duration of the last swap."""
        return self._seconds[-1] if self._seconds else None

    @property
    def median(self) -> float | None:
        """Median duration."""
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def longest(self) -> float | None:
        """Longest duration."""
        return max(self._seconds, default=None)


def swap_weights(
    policy: Policy, engine: DecodeEngine, kv_policy: KvPolicy, parameters: Parameters, ready: WeightsReady
) -> Generator[None, None, float]:
    """Serve `parameters` from now on, as a job of the compute thread; return the duration of the swap in seconds.

    With the KV policy `drain`, running rows finish first. Raises ValueError if the parameters are not the policy's.
    """
    if kv_policy == "drain":
        engine.admission_paused = True
        try:
            while engine.policy_rows:
                engine.tick()
                yield
        finally:
            engine.admission_paused = False
    seconds = policy.publish(parameters, version=ready.version, step=ready.step, fingerprint=ready.fingerprint)
    engine.weights_changed(kv_policy)
    return seconds


class Broadcaster:
    """Swaps the served weights between decode steps, then announces the version.

    A swap copies nothing: the served parameters become references to the learner's arrays. After each swap, a parity
    check compares sampler and learner on a few tokens (`clotho.scoring.parity_check`). A mean KL divergence above
    `parity.stop_kl` raises ParityError. So does the `mismatch_kl` of an update whose log-probabilities were recorded
    under the weights of the update: this compares also the prompts. The largest difference of one log-probability is
    logged if it is above `parity.warn_nats` and at least twice the difference that was logged before.

    largest_drift: largest difference of one log-probability so far, in nats.
    """

    name = "broadcaster"

    def __init__(
        self,
        *,
        inbox: Inbox[PolicyUpdated],
        weights: Latest[WeightsReady],
        executor: ComputeExecutor,
        policy: Policy,
        engine: DecodeEngine,
        settings: ParitySection,
        kv_policy: KvPolicy,
        temperature: float,
        parity_prompt: tuple[int, ...],
        swap_times: SwapTimes,
        layout: str,
        dropout: float,
        max_num_seqs: int,
        turns: TurnBudget,
    ) -> None:
        """parity_prompt: tokens for parity checks before the first group has been trained on.

        layout, dropout, turns: of the learner. max_num_seqs: of the engine, the number of rows of a check while no row
        is running.
        """
        self._inbox, self._weights = inbox, weights
        self._executor, self._policy, self._engine = executor, policy, engine
        self._settings, self._kv_policy, self._temperature = settings, kv_policy, temperature
        self._layout, self._dropout, self._max_num_seqs, self._turns = layout, dropout, max_num_seqs, turns
        self._limits = _limits(settings, policy.description.dtype)
        self._sample = _split(parity_prompt, settings.tokens if isinstance(settings, ParityCheck) else 0)
        self._swap_times = swap_times
        self._forcing: TeacherForcing | None = None
        self._parameters: Parameters | None = None
        self._warned = 0.0
        self.largest_drift = 0.0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Check parity once, signal readiness, then swap for every update that changed the policy."""
        async with self._inbox:
            await self._check_parity()
            task_status.started()
            async for update in self._inbox:
                await self._broadcast(update)

    async def _broadcast(self, update: PolicyUpdated) -> None:
        report = update.report
        self._check_recorded(report)
        if report.version != self._policy.version:
            ready = WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint)
            swap = swap_weights(self._policy, self._engine, self._kv_policy, update.parameters, ready)
            self._swap_times.add(await finish(self._executor.submit_steps(swap, kind="swap")))
            self._parameters = update.parameters
            self._choose_sample(report)
        self._weights.put(WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint))
        if report.trained:
            await self._check_parity()

    def _choose_sample(self, report: StepReport) -> None:
        if report.trained and isinstance(self._settings, ParityCheck):
            group = report.trained[0].scored.group
            completions = [completion.tokens for completion in group.completions]
            self._sample = parity_sample(group.prompt.tokens, completions, tokens=self._settings.tokens)

    def _check_recorded(self, report: StepReport) -> None:
        """Compare the recorded log-probabilities of a batch with the learner's, if they belong to the same weights.

        Not so for stale and replayed groups, for environments, which record their own, with dropout, and for prompts
        whose KV caches are kept over a weight swap.
        """
        if self._limits is None or report.update is None or report.replayed or any(report.staleness) or self._dropout:
            return
        if self._kv_policy == "keep" and self._swap_times.count:
            return
        if any(trained.scored.group.prompt.source for trained in report.trained):
            return
        self._stop_above(
            self._limits.stop_kl,
            report.update.mismatch_kl,
            f"of the completions of step {report.step} differ: prompts or weights of the sampler are not the learner's",
        )

    async def _check_parity(self) -> None:
        sample, limits = self._sample, self._limits
        if not sample.steps or limits is None:
            return
        parity: ParityReport = await finish(self._executor.submit_steps(self._compare(sample), kind="parity"))
        self.largest_drift = max(self.largest_drift, parity.max_difference)
        differ = f"differ at version {self._policy.version}: the served weights are not the trained weights"
        self._stop_above(limits.stop_kl, parity.mean_kl, differ)
        self._stop_above(SERVED_KL, parity.served_kl, differ)
        if parity.max_difference > max(limits.warn_nats, 2 * self._warned):
            self._warned = parity.max_difference
            log.warning("parity_drift", nats=parity.max_difference, kl=parity.mean_kl, version=self._policy.version)

    def _stop_above(self, limit: float, kl: float, differ: str) -> None:
        if not kl <= limit:  # NaN counts as exceeding the limit
            raise ParityError(
                f"the log-probabilities of sampler and learner {differ} "
                f"(mean KL divergence {kl:.3g} nats, limit {limit:g}; parity.stop_kl)"
            )

    def _compare(self, sample: ParitySample) -> Generator[None, None, ParityReport]:
        """Run the parity check in the compute thread."""
        policy = self._policy
        self._forcing = self._forcing or TeacherForcing(policy.model, policy.vocab_size, layout=self._layout)
        yield
        return (
            yield from check_parity(
                policy,
                self._engine,
                sample,
                temperature=self._temperature,
                rows=self._engine.running or self._max_num_seqs,
                forcing=self._forcing,
                parameters=self._parameters,
                turns=self._turns,
            )
        )


def _limits(settings: ParitySection, dtype: str) -> ParityLimits | None:
    """Return the limits of the profile, and those of the type where the profile sets none; None without checks."""
    if not isinstance(settings, ParityCheck):
        return None
    usual = LIMITS.get(dtype, LIMITS["bfloat16"])
    return ParityLimits(stop_kl=settings.stop_kl or usual.stop_kl, warn_nats=settings.warn_nats or usual.warn_nats)


def _split(tokens: tuple[int, ...], count: int) -> ParitySample:
    """Split off the last `count` tokens as a completion; the prompt keeps at least one token."""
    cut = max(1, len(tokens) - count)
    return ParitySample(tokens[:cut], (tokens[cut:],) if tokens[cut:] else ())
