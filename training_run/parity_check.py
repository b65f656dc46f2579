"""The parity check: sampler and learner compute the same distributions for the same tokens and weights.

The sampler's side are decode steps with as many rows as the running batch, because matrix kernels depend on the number
of rows. The check compares these steps with two computations.

1. The learner's: traced for a gradient, in the learner's layout, because attention uses other kernels there. Both sides
   round differently in 16 bits. `LIMITS` tells rounding from faults.
2. The same decode steps of another decoder, over a model of its own with other references to the learner's weights, so
   that nothing that was prepared for the served weights is used. The kernels are the same, so the results are equal bit
   for bit in every type. This finds faults below the rounding: an adapter with a wrong scale, or one layer of an
   earlier version.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import RouteArray
from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from clotho.models.policy_model import WeightedModel
from clotho.models.turns import UNDIVIDED, TurnBudget, Turns
from clotho.scoring.layouts.forward import UNLIMITED_BUDGET
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import EngineSection
from clotho.settings.learner import LearnerSection
from training_run.forced_decoder import ForcedDecoder

Submit = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a function in another thread: `clotho.lanes.compute_thread.ComputeThread.submit`."""

MAX_ROWS = 32
"""Maximum number of rows of the decode batch; Metal uses one kernel for 13 to about 500 rows."""

TOKENS_PER_TURN = 8
"""Number of tokens whose distributions are compared in one turn."""

MAX_PROMPT = 64
"""Maximum number of prompt tokens of a check. Longer prompts lose their first tokens."""


class ParityLimits(Struct, frozen=True, kw_only=True):
    """Limits of a parity check, in nats.

    stop_kl: maximum mean KL divergence. warn_nats: largest difference of one log-probability without a warning.
    """

    stop_kl: float
    warn_nats: float


SERVED_KL = 1e-9
"""Maximum mean KL divergence of decode steps with equal weights, in nats; it is 0 if the weights are the learner's."""

LIMITS = {
    "float32": ParityLimits(stop_kl=1e-3, warn_nats=0.05),
    "float16": ParityLimits(stop_kl=3e-3, warn_nats=0.25),
    "bfloat16": ParityLimits(stop_kl=0.05, warn_nats=2.0),
}
"""Default limits by the type that the model computes in; docs/numerics-internals.md has the measurements.

Those of float32 leave room for TF32, which MLX uses for large products on recent GPUs.
"""


class ParityReport(Struct, frozen=True, kw_only=True):
    """The differences between sampler and learner on the same tokens, in nats; each may be NaN or inf.

    mean_kl: KL(sampler || learner) over the whole vocabulary, mean over tokens. max_difference: largest absolute
    difference of the log-probabilities of the tokens. served_kl: mean KL divergence between decode steps with the
    served weights and with the learner's; 0 if decode steps with the same weights are not reproducible. rows: number of
    rows of the decode batch. flipped_routes: experts that the learner's routers choose for these tokens and the
    sampler's did not, per layer and 1,000 tokens; None without experts. If there are any and the learner can replay the
    routes of the sampler, it does so for the other values, and unreplayed_kl is the mean KL divergence without it.
    """

    rows: int
    tokens: int
    mean_kl: float
    max_difference: float
    served_kl: float
    flipped_routes: float | None = None
    unreplayed_kl: float | None = None


class TeacherForcedDecoder(Protocol):
    """What decodes given tokens, such as a `ForcedDecoder`."""

    def teacher_forced_logits(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int]], *, rows: int
    ) -> Generator[mx.array, None, Sequence[RouteArray]]:
        """Yield the logits before each token, (rows, V), from decode steps. Completions repeat until rows are full.

        Returns the routes of prompt and tokens but the last of each completion; nothing for a model without experts.
        """


class ParitySample(NamedTuple):
    """Tokens of a parity check: completions of one prompt, of equal lengths."""

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> int:
        """Length of the completions; 0 without completions."""
        return len(self.completions[0]) if self.completions else 0


def parity_sample(prompt: Sequence[int], completions: Sequence[Sequence[int]], *, tokens: int) -> ParitySample:
    """Choose at least `tokens` tokens, if there are as many, with the fewest decode steps.

    Completions are cut to a common length; shorter ones are left out. The sample has no completions if all are empty.
    """
    longest = sorted((tuple(one) for one in completions[:MAX_ROWS] if one), key=len, reverse=True)
    best: tuple[int, int] | None = None  # completions, steps
    for count, one in enumerate(longest, start=1):
        candidate = (count, min(len(one), -(-tokens // count)))
        if best is None or _rank(candidate, tokens) > _rank(best, tokens):
            best = candidate
    count, steps = best or (0, 0)
    return ParitySample(tuple(prompt), tuple(one[:steps] for one in longest[:count]))


def _rank(candidate: tuple[int, int], tokens: int) -> tuple[int, int]:
    count, steps = candidate
    return min(tokens, count * steps), -steps


class ParityModels(NamedTuple):
    """What a parity check compares.

    served: the decoder of the served weights. policy: a model that nothing else computes with. decoder, forcing: over
    this model, forcing with the learner's layout. turns: limits the duration of turns. replays: whether the learner may
    replay routes.
    """

    served: TeacherForcedDecoder
    policy: WeightedModel
    decoder: TeacherForcedDecoder
    forcing: TeacherForcing
    turns: TurnBudget = UNDIVIDED
    replays: bool = False

    def check(self, sample: ParitySample, parameters: Parameters, *, temperature: float, rows: int) -> ParityReport:
        """Compare distributions of decode steps under the served weights with those of the learner's `parameters`.

        temperature: 0 (greedy) compares at temperature 1. rows: number of rows of the decode batch; at least the number
        of completions is used, and at most `MAX_ROWS`. Raises ValueError if the prompt or a completion is empty.
        """
        if not sample.prompt or not sample.steps:
            raise ValueError("a parity check needs at least one token of prompt and of completion")
        rows = min(max(rows, len(sample.completions)), MAX_ROWS)
        sample = sample._replace(prompt=sample.prompt[-MAX_PROMPT:])
        distribution = SamplingDistribution(temperature=temperature or 1.0)
        learner = flat(parameters)
        served_N_V, routes = self._decoded(self.served, sample, rows)
        self.policy.use(nested({name: mx.stop_gradient(array) for name, array in learner.items()}))
        decoded_N_V, _ = self._decoded(self.decoder, sample, rows)
        learner_N_V, flips = self._traced(sample, nested(learner), routes, replays=False)
        target_N = np.concatenate([np.asarray(one, dtype=np.int32) for one in sample.completions])
        kl_N, difference_N = _differences(served_N_V, learner_N_V, target_N, distribution, self.turns)
        unreplayed_kl = None
        if flips and self.replays and self.forcing.can_replay:
            unreplayed_kl = float(kl_N.mean())
            learner_N_V, _ = self._traced(sample, nested(learner), routes, replays=True)
            kl_N, difference_N = _differences(served_N_V, learner_N_V, target_N, distribution, self.turns)
        served_kl = 0.0
        if not _are_equal(served_N_V, decoded_N_V):
            repeated_N_V, _ = self._decoded(self.served, sample, rows)
            if _are_equal(served_N_V, repeated_N_V):
                served_kl_N, _ = _differences(served_N_V, decoded_N_V, target_N, distribution, self.turns)
                served_kl = float(served_kl_N.mean())
        return ParityReport(
            rows=rows,
            tokens=len(target_N),
            mean_kl=float(kl_N.mean()),
            max_difference=float(difference_N.max()),
            served_kl=served_kl,
            flipped_routes=flips,
            unreplayed_kl=unreplayed_kl,
        )

    def _decoded(
        self, decoder: TeacherForcedDecoder, sample: ParitySample, rows: int
    ) -> tuple[mx.array, Sequence[RouteArray]]:
        """Return the logits of decode steps, (N, V), by completion, and the routes of each completion."""
        logits_T_n_V, routes = [], list[RouteArray]()

        def steps() -> Generator[mx.array, None, None]:
            routes.extend(
                (yield from decoder.teacher_forced_logits(sample.prompt, sample.completions, rows=rows)) or ()
            )

        for logits_B_V in steps():
            logits_T_n_V.append(logits_B_V[: len(sample.completions)])
            self.turns.pause()
        logits_n_T_V = mx.stack(logits_T_n_V, axis=1)
        return logits_n_T_V.reshape(-1, logits_n_T_V.shape[-1]), routes

    def _traced(
        self, sample: ParitySample, parameters: Parameters, routes: Sequence[RouteArray], *, replays: bool
    ) -> tuple[mx.array, float | None]:
        """Return the logits before each token of the completions, (N, V), as the learner computes them for a gradient.

        The second result is the number of flipped routes per layer and 1,000 tokens; None without routes. There is no
        dropout, and the gradient itself is not evaluated. routes: of each completion. replays: whether the learner
        takes them.
        """
        policy, forcing, turns = self.policy, self.forcing, self.turns
        turns.begin()
        sequences = [scored_only(sample.prompt, one) for one in sample.completions]
        if routes:
            sequences = [
                one._replace(
                    route_I_E=route_I_L_K.reshape(len(route_I_L_K), -1).view(np.uint8),
                    loss_mask_T=np.ones(len(one.tokens), dtype=np.float32),
                )
                for one, route_I_L_K in zip(sequences, routes, strict=True)
            ]
        (micro,) = build_micro_batches(sequences, layout=forcing.layout, budget=UNLIMITED_BUDGET, replays=replays)

        def summed(traced: Parameters) -> tuple[mx.array, mx.array, mx.array]:
            policy.use(traced)
            logits_N_V, flips_2 = forcing.logits(micro)
            return mx.sum(logits_N_V), logits_N_V, mx.zeros(2) if flips_2 is None else flips_2

        try:
            with policy.training_mode(), turns.recorded(policy.model, gradients=False) as stages:
                for module in policy.model.modules():
                    if isinstance(module, nn.Dropout):
                        module.eval()
                (_, logits_N_V, flips_2), _ = mx.value_and_grad(summed)(nested(flat(parameters)))
        finally:
            policy.use(parameters)
        tokens = sum(map(len, sample.completions))
        member_N = np.asarray(micro.members)[micro.table.sequence_N[:tokens]]
        logits_N_V = logits_N_V[mx.array(np.argsort(member_N, kind="stable"))]
        turns.evaluate(stages.take(), (logits_N_V, flips_2))
        flips, places = np.array(flips_2).tolist()
        return logits_N_V, flips / places if places else None


class ServedDecoder:
    """Decode steps of the served engine for another thread. They run in the engine's own, between its other steps."""

    def __init__(self, decoder: TeacherForcedDecoder, decode: Submit, turns: Turns) -> None:
        """decode: runs a function in the engine's thread. turns: of the other, which has no turn while it waits."""
        self._decoder, self._decode, self._turns = decoder, decode, turns

    def teacher_forced_logits(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int]], *, rows: int
    ) -> Generator[mx.array, None, Sequence[RouteArray]]:
        """Yield the logits before each token, (rows, V), from decode steps; return the routes."""
        steps = self._decoder.teacher_forced_logits(prompt, completions, rows=rows)
        routes: list[RouteArray] = []

        def step() -> mx.array | None:
            try:
                return next(steps)
            except StopIteration as end:
                routes.extend(end.value)
                return None

        while True:
            with self._turns.outside():
                logits_B_V = self._decode(step).result()
            if logits_B_V is None:
                return routes
            yield logits_B_V


class ParityChecker:
    """Parity checks with a model and a decoder of their own, in one thread."""

    def __init__(
        self,
        policy: Policy,
        engine: DecodeEngine,
        *,
        settings: EngineSection,
        learner: LearnerSection,
        decode: Submit,
        lane: Turns,
        forcing: TeacherForcing | None = None,
    ) -> None:
        """engine: of the served weights, with these settings. learner: with the layout to compare with.

        decode: runs a function in the engine's thread. lane: of the thread of the checks. forcing: the learner's, whose
        layout is not checked again.
        """
        self._engine, self._rows, model = engine, settings.max_num_seqs, policy.copy_model()
        self._models = ParityModels(
            served=ServedDecoder(ForcedDecoder.of_engine(engine), decode, lane),
            policy=model,
            decoder=ForcedDecoder.of_model(model.model, settings),
            forcing=TeacherForcing(model.model, model.vocab_size, layout=learner.layout, checked=forcing),
            turns=TurnBudget(learner.max_turn_ms / 1000.0, lane),
            replays=learner.router_replay != "off",
        )

    def check(
        self, sample: ParitySample, parameters: Parameters, *, temperature: float, tokens: int = MAX_ROWS
    ) -> ParityReport:
        """Compare the served weights with `parameters`, with as many rows as are running, or as can run.

        tokens: `parity.tokens`; decode steps have at most as many rows, so that a smaller number means less work.
        """
        rows = min(self._engine.running or self._rows, tokens)
        try:
            return self._models.check(sample, parameters, temperature=temperature, rows=rows)
        finally:
            self._models.policy.release()


def _are_equal(p_N_V: mx.array, q_N_V: mx.array) -> bool:
    return bool(mx.array_equal(p_N_V, q_N_V, equal_nan=True).item())


def _differences(
    p_N_V: mx.array, q_N_V: mx.array, target_N: NDArray[np.int32], distribution: SamplingDistribution, turns: TurnBudget
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return KL(p || q) and the absolute difference of the targets' log-probabilities, (N,) each, from logits."""
    kl_N, difference_N = np.zeros(len(target_N)), np.zeros(len(target_N))
    for n, target in enumerate(target_N):
        if n % TOKENS_PER_TURN == 0:
            turns.pause()
        p_logp_V, q_logp_V = _logp(p_N_V[n], distribution), _logp(q_N_V[n], distribution)
        kl_N[n] = np.sum(np.exp(p_logp_V) * (p_logp_V - q_logp_V))
        difference_N[n] = abs(p_logp_V[target] - q_logp_V[target])
    return kl_N, difference_N


def _logp(logits_V: mx.array, distribution: SamplingDistribution) -> NDArray[np.float64]:
    """Return log-probabilities in float64, so that the KL divergence of equal distributions is about 1e-13."""
    z_V = np.array(logits_V.astype(mx.float32)).astype(np.float64) / distribution.temperature
    z_V -= z_V.max()
    log_probability_V: NDArray[np.float64] = z_V - np.log(np.exp(z_V).sum())
    return log_probability_V
