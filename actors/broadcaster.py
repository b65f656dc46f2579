"""Broadcaster -> generator, server: serves the newest weights, and checks parity between sampler and learner."""

from __future__ import annotations

import time

import anyio
import structlog
from anyio.abc import TaskStatus

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.policy import Policy
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.engine import EngineSection
from clotho.settings.learner import LearnerSection
from protocols.errors import ParityError
from protocols.queues import Inbox
from protocols.step import PolicyUpdated, StepReport, WeightsReady
from training_run.groups.progress import SwapTimes
from training_run.parity_check import (
    LIMITS,
    SERVED_KL,
    ParityChecker,
    ParityLimits,
    ParityReport,
    ParitySample,
    parity_sample,
)
from training_run.profile.schema import ParityCheck, ParitySection
from training_run.serving import swap_weights
from training_run.supervision.latest import Latest

log = structlog.get_logger(actor="broadcaster")


class Broadcaster:
    """Swaps the served weights between decode steps, then announces the version.

    A swap copies nothing: the served parameters become references to the learner's arrays. Three checks compare sampler
    and learner, and raise ParityError:

    * before each swap, whether the served model still refers to the arrays of the swap before, which costs nothing;
    * for each update whose log-probabilities were recorded under the weights of the update, its `mismatch_kl`, which is
      a by-product of the update and compares also the prompts;
    * at the start, and after a swap while all checks together take at most `parity.budget` of the time of training, the
      distributions at a few tokens (`training_run.parity_check`).

    A mean KL divergence may be at most `parity.stop_kl`. The largest difference of one log-probability is logged if it
    is above `parity.warn_nats` and at least twice the difference that was logged before. If a setting rounds keys and
    values, the first check logs what that costs.

    largest_drift: largest difference of one log-probability so far, in nats.
    """

    name = "broadcaster"

    def __init__(
        self,
        *,
        inbox: Inbox[PolicyUpdated],
        weights: Latest[WeightsReady],
        compute: Compute,
        policy: Policy,
        engine: DecodeEngine,
        settings: ParitySection,
        engine_settings: EngineSection,
        temperature: float,
        parity_prompt: tuple[int, ...],
        swap_times: SwapTimes,
        learner: LearnerSection,
        dropout: float,
        forcing: TeacherForcing,
    ) -> None:
        """parity_prompt: tokens for parity checks before the first group has been trained on.

        dropout: of the adapter. forcing: the learner's, which has checked its layout.
        """
        self._inbox, self._weights = inbox, weights
        self._compute, self._policy, self._engine = compute, policy, engine
        self._settings, self._engine_settings, self._temperature = settings, engine_settings, temperature
        self._learner, self._dropout, self._forcing = learner, dropout, forcing
        self._limits = _limits(settings, policy.description.dtype)
        self._sample = _split(parity_prompt, settings.tokens if isinstance(settings, ParityCheck) else 0)
        self._swap_times = swap_times
        self._checker: ParityChecker | None = None
        self._parameters = policy.trainable()
        self._rounding_stated = False
        self._warned = self._began = self._check_seconds = self._last_check_seconds = 0.0
        self.largest_drift = 0.0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Check parity once, signal readiness, then swap for every update that changed the policy."""
        async with self._inbox:
            await self._check_parity()
            self._began, self._check_seconds = time.monotonic(), 0.0
            task_status.started()
            async for update in self._inbox:
                await self._broadcast(update)

    async def _broadcast(self, update: PolicyUpdated) -> None:
        report = update.report
        self._check_recorded(report)
        if report.version != self._policy.version:
            await self._check_references()
            ready = WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint)
            kv_policy = self._engine_settings.kv_policy
            swap = swap_weights(self._compute.decode, self._policy, self._engine, kv_policy, update.parameters, ready)
            self._swap_times.add(await swap)
            self._parameters = update.parameters
            self._choose_sample(report)
        self._weights.put(WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint))
        if report.trained and self._budget_allows_check():
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
        if self._engine_settings.kv_policy == "keep" and self._swap_times.count:
            return
        if any(trained.scored.group.prompt.source for trained in report.trained):
            return
        self._stop_above(
            self._limits.stop_kl,
            report.update.mismatch_kl,
            f"of the completions of step {report.step} differ: prompts or weights of the sampler are not the learner's",
        )

    async def _check_references(self) -> None:
        if self._limits is None:
            return
        if not await finish(self._compute.decode.submit(lambda: self._policy.serves(self._parameters))):
            raise ParityError(
                f"the served model no longer refers to the weights of version {self._policy.version}: something else "
                "has changed it"
            )

    def _budget_allows_check(self) -> bool:
        """Whether one more check keeps the checks since the first one within their share of the time."""
        if not isinstance(self._settings, ParityCheck):
            return False
        share = (self._check_seconds + self._last_check_seconds) / (time.monotonic() - self._began)
        return self._settings.budget == 1.0 or share <= self._settings.budget

    async def _check_parity(self) -> None:
        sample, limits, settings, began = self._sample, self._limits, self._settings, time.monotonic()
        if not sample.steps or limits is None or not isinstance(settings, ParityCheck):
            return
        parity = await finish(self._compute.parity.submit(lambda: self._compare(sample, settings.tokens)))
        self._last_check_seconds = time.monotonic() - began
        self._check_seconds += self._last_check_seconds
        self.largest_drift = max(self.largest_drift, parity.max_difference)
        if parity.flipped_routes and not self._policy.flips_routes:
            self._policy.flips_routes = True
            log.warning("routes_flipped", per_1000_tokens=parity.flipped_routes, kl=parity.unreplayed_kl)
        differ = f"differ at version {self._policy.version}: "
        cause, rounded = "the served weights are not the trained weights", self._engine.rounded_by
        if rounded and not self._rounding_stated:
            self._rounding_stated = True
            log.warning("kv_cache_rounded", setting=rounded, kl=parity.mean_kl, limit=limits.stop_kl)
        coarse = f"{rounded} rounds keys and values too much, or " if rounded else ""
        self._stop_above(limits.stop_kl, parity.mean_kl, differ + coarse + cause)
        self._stop_above(SERVED_KL, parity.served_kl, differ + cause)
        if parity.max_difference > max(limits.warn_nats, 2 * self._warned):
            self._warned = parity.max_difference
            log.warning("parity_drift", nats=parity.max_difference, kl=parity.mean_kl, version=self._policy.version)

    def _stop_above(self, limit: float, kl: float, differ: str) -> None:
        if not kl <= limit:  # NaN counts as exceeding the limit
            raise ParityError(
                f"the log-probabilities of sampler and learner {differ} "
                f"(mean KL divergence {kl:.3g} nats, limit {limit:g}; parity.stop_kl)"
            )

    def _compare(self, sample: ParitySample, tokens: int) -> ParityReport:
        """Run the parity check in its thread."""
        if self._checker is None:
            self._checker = ParityChecker(
                self._policy,
                self._engine,
                settings=self._engine_settings,
                learner=self._learner,
                decode=self._compute.decode.submit,
                lane=self._compute.parity.lane,
                forcing=self._forcing,
            )
        return self._checker.check(sample, self._parameters, temperature=self._temperature, tokens=tokens)


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
