"""What a batch needs of the sampler: the rows' settings as arrays, and only those that some row uses.

What the engine accepts. A refusal names the field; nothing unchecked reaches the device.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import Struct

from protocols.errors import RequestError
from protocols.sampling import MAX_SUPPORT, PARAMETERS, SampleRequest, Sampling, can_record_support

NEUTRAL = Sampling()


class Filters(NamedTuple):
    """Top-p (infinite = off), top-k (the vocabulary's size = off) and min-p (0 = off) of every row."""

    top_p_B: mx.array
    top_k_B: mx.array
    min_p_B: mx.array


class Bias(NamedTuple):
    """Added to the logits: K (token, value) pairs per row, padded with value 0."""

    token_B_K: mx.array
    value_B_K: mx.array


class Recording(NamedTuple):
    """Which rows report what could have been sampled, and how many tokens that is at most."""

    row_R: mx.array
    width: int


class SamplingPlan(Struct, frozen=True, kw_only=True):
    """Settings of B rows; an array that is None is used by no row.

    all_greedy: nothing is sampled at random. greedy_B: which rows take the argmax, where only some do.
    top_logprobs: the most alternatives that any row asks for. recording: whose supports are reported, if any row's.
    """

    all_greedy: bool
    greedy_B: mx.array | None = None
    inverse_temperature_B: mx.array | None = None
    filters: Filters | None = None
    penalty_B: mx.array | None = None
    bias: Bias | None = None
    top_logprobs: int = 0
    recording: Recording | None = None


def plan_sampling(
    settings: Sequence[Sampling | None], vocabulary: int, *, recorded: Collection[int] = ()
) -> SamplingPlan:
    """Collect the settings of each row into arrays; None stands for a slot without a row.

    recorded: rows that are to report what could have been sampled; those that can draw any token have nothing to say.
    """
    used = [s if s is not None else NEUTRAL for s in settings]
    greedy = np.array([s.temperature == 0.0 for s in used])
    live_greedy = [s.temperature == 0.0 for s in settings if s is not None]
    return SamplingPlan(
        all_greedy=all(live_greedy),
        greedy_B=mx.array(greedy) if greedy.any() else None,
        inverse_temperature_B=_unless([1.0 / s.temperature if s.temperature else 1.0 for s in used], 1.0),
        filters=_filters(used, vocabulary),
        penalty_B=_unless([s.repetition_penalty for s in used], 1.0),
        bias=_bias(used),
        top_logprobs=max(s.top_logprobs for s in used),
        recording=_recording([row for row in sorted(recorded) if truncates(used[row], vocabulary)], used, vocabulary),
    )


def truncates(sampling: Sampling, vocabulary: int) -> bool:
    """Say whether filters may leave tokens out. Not of a greedy row: it reports the whole, untempered distribution."""
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0 or 0 < sampling.top_k < vocabulary
    return filtered and sampling.temperature != 0.0


def _unless(values: Sequence[float], neutral: float) -> mx.array | None:
    return mx.array(np.array(values, dtype=np.float32)) if any(v != neutral for v in values) else None


def _filters(used: Sequence[Sampling], vocabulary: int) -> Filters | None:
    """Settings of the filters, where some row that draws at random has one; a greedy row keeps every token."""
    free = [s if truncates(s, vocabulary) else NEUTRAL for s in used]
    if all(s is NEUTRAL for s in free):
        return None
    top_k = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in free]
    # 1 must keep tokens that a rounded prefix sum already puts at 1.
    top_p = np.array([s.top_p if s.top_p < 1.0 else np.inf for s in free], dtype=np.float32)
    min_p = np.array([s.min_p for s in free], dtype=np.float32)
    k = np.array(top_k, dtype=np.int32)
    return Filters(mx.array(top_p), mx.array(k), mx.array(min_p))


def _recording(rows: Sequence[int], used: Sequence[Sampling], vocabulary: int) -> Recording | None:
    if not rows:
        return None
    width = max(used[row].top_k for row in rows)
    return Recording(mx.array(np.array(rows, dtype=np.int32)), min(width, vocabulary))


def _bias(used: Sequence[Sampling]) -> Bias | None:
    width = max(len(s.logit_bias) for s in used)
    if width == 0:
        return None
    token_B_K = np.zeros((len(used), width), dtype=np.int32)
    value_B_K = np.zeros((len(used), width), dtype=np.float32)
    for row, sampling in enumerate(used):
        for k, (token, value) in enumerate(sampling.logit_bias):
            token_B_K[row, k], value_B_K[row, k] = token, value
    return Bias(mx.array(token_B_K), mx.array(value_B_K))


MAX_COMPLETIONS = 4096
"""Maximum number of completions of one request."""


def validate(request: SampleRequest, *, vocabulary: int, context: int, cache_tokens: int) -> int:
    """Check a request and return the maximum length of its completions: `max_tokens`, limited by the context length.

    Raises RequestError, which names the field, for an empty prompt, tokens outside the vocabulary, a prompt that fills
    the context, a completion that the KV cache cannot hold, seeds outside [0, 2**64), sampling parameters out of range,
    and a request to record supports without a `top_k` that limits their size.
    """
    _check_tokens(request.prompt, vocabulary, "prompt")
    if not request.prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if len(request.prompt) >= context:
        message = f"the prompt has {len(request.prompt)} tokens, but the context length is {context}"
        raise RequestError(message, param="prompt")
    _check_seeds(request.seeds)
    _check_sampling(request.sampling, vocabulary)
    _check_support(request, vocabulary)
    limit = min(request.sampling.max_tokens, context - len(request.prompt))
    if len(request.prompt) + limit > cache_tokens:
        message = (
            f"prompt and completion need up to {len(request.prompt) + limit} tokens; the KV cache holds {cache_tokens}"
        )
        raise RequestError(message, param="max_tokens")
    return limit


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_tokens(tokens: Iterable[int], vocabulary: int, param: str) -> None:
    for token in tokens:
        if not _is_int(token) or not 0 <= token < vocabulary:
            raise RequestError(f"token {token!r} is not an identifier in [0, {vocabulary})", param=param)


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not 1 <= len(seeds) <= MAX_COMPLETIONS:
        raise RequestError(f"{len(seeds)} completions requested; 1 to {MAX_COMPLETIONS} are possible", param="n")
    for seed in seeds:
        if not _is_int(seed) or not 0 <= seed < 2**64:
            raise RequestError(f"seed {seed!r} is not an integer in [0, 2**64)", param="seed")


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
    for name, parameter in PARAMETERS.items():
        value = getattr(sampling, name)
        try:
            msgspec.convert(value, parameter.annotation)
        except msgspec.ValidationError as error:
            shown = reprlib.repr(value)
            raise RequestError(f"{name} is {shown}; allowed is {parameter.allowed} ({error})", param=name) from error
    _check_tokens((token for token, _ in sampling.logit_bias), vocabulary, "logit_bias")
    _check_tokens(sampling.stop_token_ids, vocabulary, "stop_token_ids")


def _check_support(request: SampleRequest, vocabulary: int) -> None:
    sampling = request.sampling
    if request.record_support and truncates(sampling, vocabulary) and not can_record_support(sampling):
        message = f"top_k is {sampling.top_k}; recorded supports need a top_k of 1 to {MAX_SUPPORT}"
        raise RequestError(message, param="top_k")
