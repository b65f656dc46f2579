"""Helpers of the engine tests: submit requests, record their events, and compute reference results without a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from bench.contenders.shapes import Shape, quantized_model, random_model
from clotho.inference.engine import DecodeEngine
from clotho.models.turns import TurnBudget
from clotho.settings.engine import EngineSection
from protocols.sampling import (
    Completion,
    CompletionDone,
    SampleEvent,
    SampleFailed,
    SampleRequest,
    Sampling,
    TokenSampled,
)
from tests import model_lanes
from tests.small_models import FixedSource, tiny_source
from training_run.profile.mounted import with_attachments

ENGINE = with_attachments(EngineSection, "engine")
"""The settings of an engine with those of attachments."""

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = Sampling(max_tokens=12, ignore_eos=True)


@dataclass
class RecordedEvents:
    """The events of one request, in order."""

    events: list[SampleEvent] = field(default_factory=list)

    @property
    def completions(self) -> list[Completion]:
        """Return the finished completions by index."""
        done = [e for e in self.events if isinstance(e, CompletionDone)]
        return [e.completion for e in sorted(done, key=lambda e: e.index)]

    @property
    def failures(self) -> list[str]:
        """Return the reasons of failure."""
        return [e.reason for e in self.events if isinstance(e, SampleFailed)]

    def streamed(self, index: int = 0) -> list[TokenSampled]:
        """Return the tokens streamed of one completion."""
        return [e for e in self.events if isinstance(e, TokenSampled) and e.index == index]

    def text(self, index: int = 0) -> str:
        """Return the streamed text of one completion, tail included."""
        tails = [e.tail for e in self.events if isinstance(e, CompletionDone) and e.index == index]
        return "".join([e.text for e in self.streamed(index)] + tails)


def base_model(shape: Shape, precision: str) -> Any:
    """Return a model with random weights in "float32", "bfloat16" or "4 bits"."""
    if precision == "4 bits":
        return quantized_model(shape)
    model = random_model(shape)
    if precision == "bfloat16":
        model.set_dtype(mx.bfloat16)
    return model


def make_engine(source: FixedSource | None = None, *, turns: TurnBudget | None = None, **settings: Any) -> DecodeEngine:
    """Make an engine over `source`, or a tiny Qwen3."""
    return DecodeEngine(source or tiny_source(), ENGINE(**settings), turns=turns)


def submit_request(
    engine: DecodeEngine,
    prompt: Sequence[int],
    sampling: Sampling = SAMPLED,
    seeds: Sequence[int] = (7,),
    **options: Any,
) -> RecordedEvents:
    """Submit a request. Its events are recorded as the engine ticks."""
    answer = RecordedEvents()
    request = SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=tuple(seeds), **options)
    engine.submit(request, answer.events.append)
    return answer


def run(engine: DecodeEngine, *, most: int = 2000) -> int:
    """Tick until the engine has no work, and return the number of sampled tokens."""
    sampled = 0
    for _ in range(most):
        if not engine.has_work:
            return sampled
        sampled += engine.tick()
    raise AssertionError(f"the engine still has work after {most} ticks: {engine.stats()}")


def complete_alone(source: FixedSource, prompt: Sequence[int], sampling: Sampling, seed: int = 7) -> Completion:
    """Complete one prompt in an engine of its own."""
    engine = make_engine(source)
    answer = submit_request(engine, prompt, sampling, (seed,))
    run(engine)
    return answer.completions[0]


def full_logits(model: nn.Module, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the logits (T, V) of all positions, computed without a cache."""
    return np.array(model(mx.array([list(tokens)]))[0].astype(mx.float32)).astype(np.float64)


def log_softmax(x_V: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural-log probabilities."""
    shifted = x_V - x_V.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def processed_logprobs(
    logits_V: NDArray[np.float64],
    seen: Sequence[int],
    s: Sampling,
    sampled: Sequence[int] = (),
    end_tokens: Sequence[int] = (),
) -> NDArray[np.float64]:
    """Return log-probabilities after all logits processors, computed as the documentation of Sampling defines them.

    seen: tokens of prompt and completion. sampled: tokens of the completion.
    """
    x = logits_V.copy()
    vocabulary = range(len(x))
    forbidden = {token for token in vocabulary if token not in s.allowed_token_ids} if s.allowed_token_ids else set()
    if len(sampled) < s.min_tokens:
        forbidden |= {*s.stop_token_ids, *(() if s.ignore_eos else end_tokens)}
    forbidden |= {word[-1] for word in s.bad_words if tuple([*sampled, word[-1]][-len(word) :]) == word}
    for token, times in Counter(sampled).items():
        x[token] -= s.frequency_penalty * times + s.presence_penalty
    x[sorted(forbidden.intersection(vocabulary))] = -np.inf
    for token, value in s.logit_bias:
        x[token] += value
    for token in set(seen):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    if s.temperature == 0.0:
        return log_softmax(x)
    x /= s.temperature
    order = np.argsort(-x, kind="stable")
    prob = np.exp(log_softmax(x))[order]
    keep = np.cumsum(prob) - prob < s.top_p if s.top_p < 1 else np.ones(len(x), dtype=bool)
    if s.top_k:
        keep &= np.arange(len(x)) < s.top_k
    keep &= prob >= s.min_p * prob[0]
    x[order[~keep]] = -np.inf
    return log_softmax(x)


def reference_logprobs(
    model: nn.Module, prompt: Sequence[int], completion: Completion, sampling: Sampling
) -> NDArray[np.float64]:
    """Return the log-probability of each token of a completion, from one full forward pass.

    With temperature 0, also check that each token is the most probable one; in 16 bits on a GPU, up to the tolerance of
    the lane.
    """
    tolerance = 0.0 if model_lanes.is_batch_invariant() else model_lanes.atol(0.0)
    tokens = [*prompt, *completion.tokens]
    logits_T_V = full_logits(model, tokens)
    start = len(prompt)
    found = []
    for t in range(start, len(tokens)):
        logp_V = processed_logprobs(logits_T_V[t - 1], tokens[:t], sampling, tokens[start:t], (256,))
        found.append(logp_V[tokens[t]])
        assert sampling.temperature > 0.0 or found[-1] >= logp_V.max() - tolerance, t
    return np.array(found)


def make_prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Return a prompt of bytes that differs by `salt`."""
    return tuple((31 * salt + 7 * i + i * i) % 256 for i in range(length))


def tick_until(engine: DecodeEngine, condition: Callable[[], bool], *, most: int = 500) -> None:
    """Tick until `condition` holds."""
    for _ in range(most):
        if condition():
            return
        engine.tick()
    raise AssertionError("the condition never held")
