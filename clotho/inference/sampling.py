"""From sampling parameters to tokens: validation of requests, parameters of a batch as arrays, and sampling.

Sampling functions take a batch of logits (B, V) in float32 and stay on the device. Parameters that no row uses cost
nothing: without filters there is no sort, without penalties no table of previous tokens, without excluded tokens no
mask, and without recorded supports none are collected. A backend can bring the same algorithm for the host
(`clotho.backend.Backend.row_sampler`).

Random numbers depend on (seed, position) only, so a row samples the same tokens whatever its neighbours are.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from clotho.inference.rows import (
    BLOCK,
    ONE_STAGE,
    PADDING,
    CountPenalties,
    Filters,
    Reporting,
    RowLogitBias,
    RowParameters,
    SampledRows,
    Supports,
    TokenMasks,
)
from protocols.errors import RequestError
from protocols.sampling import (
    MAX_SUPPORT,
    PARAMETERS,
    SampleRequest,
    Sampling,
    below_least_positive,
    can_record_support,
    truncates,
)

DEFAULT = Sampling()


def row_parameters(
    settings: Sequence[Sampling | None], vocabulary: int, *, recorded: Collection[int] = ()
) -> RowParameters:
    """Collect the sampling parameters of all rows into arrays. None stands for a slot without a row.

    recorded: rows that report their support. Rows whose support is the whole vocabulary report nothing.
    """
    used = [s if s is not None else DEFAULT for s in settings]
    greedy = np.array([s.temperature == 0.0 for s in used])
    live_greedy = [s.temperature == 0.0 for s in settings if s is not None]
    return RowParameters(
        all_greedy=all(live_greedy),
        greedy_B=mx.array(greedy) if greedy.any() else None,
        inverse_temperature_B=_array_unless([1.0 / s.temperature if s.temperature else 1.0 for s in used], 1.0),
        filters=_filters(used, vocabulary),
        penalty_B=_array_unless([s.repetition_penalty for s in used], 1.0),
        bias=_bias(used),
        alternatives=_reporting({row: s.top_logprobs for row, s in enumerate(used) if s.top_logprobs}),
        count_penalties=_count_penalties(used),
        recording=_reporting(
            {row: min(used[row].top_k, vocabulary) for row in sorted(recorded) if truncates(used[row], vocabulary)}
        ),
    )


def _array_unless(values: Sequence[float], neutral: float) -> mx.array | None:
    return mx.array(np.array(values, dtype=np.float32)) if any(v != neutral for v in values) else None


def _filters(used: Sequence[Sampling], vocabulary: int) -> Filters | None:
    """Return the filters of the rows that have any. Greedy rows keep every token."""
    filtered = [(row, s) for row, s in enumerate(used) if truncates(s, vocabulary)]
    if not filtered:
        return None
    # With top_p = 1, tokens stay even if the rounded prefix sum before them is already 1.
    top_p = [s.top_p if s.top_p < 1.0 else np.inf for _, s in filtered]
    top_k = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for _, s in filtered]
    return Filters(
        _indices(row for row, _ in filtered),
        mx.array(np.array(top_p, dtype=np.float32)),
        mx.array(np.array(top_k, dtype=np.int32)),
        mx.array(np.array([s.min_p for _, s in filtered], dtype=np.float32)),
    )


def _indices(rows: Iterable[int]) -> mx.array:
    return mx.array(np.array(list(rows), dtype=np.int32))


def _reporting(number_of: Mapping[int, int]) -> Reporting | None:
    return Reporting(_indices(number_of), max(number_of.values())) if number_of else None


def _bias(used: Sequence[Sampling]) -> RowLogitBias | None:
    width = max(len(s.logit_bias) for s in used)
    if width == 0:
        return None
    token_B_K = np.zeros((len(used), width), dtype=np.int32)
    value_B_K = np.zeros((len(used), width), dtype=np.float32)
    for row, sampling in enumerate(used):
        for k, (token, value) in enumerate(sampling.logit_bias):
            token_B_K[row, k], value_B_K[row, k] = token, value
    return RowLogitBias(mx.array(token_B_K), mx.array(value_B_K))


def _count_penalties(used: Sequence[Sampling]) -> CountPenalties | None:
    rows = [row for row, sampling in enumerate(used) if sampling.presence_penalty or sampling.frequency_penalty]
    if not rows:
        return None
    presence = np.array([used[row].presence_penalty for row in rows], dtype=np.float32)
    frequency = np.array([used[row].frequency_penalty for row in rows], dtype=np.float32)
    return CountPenalties(np.array(rows, dtype=np.int32), presence, frequency)


def sample(
    logits_B_V: mx.array,
    uniform_B_2: mx.array | None,
    parameters: RowParameters,
    seen_B_V: mx.array | None,
    *,
    count_R_V: mx.array | None = None,
    masks: TokenMasks | None = None,
) -> SampledRows:
    """Sample one token per row by inverting the distribution function; greedy rows take the most probable token.

    Order: masks, logit bias, penalties, temperature, then top-p, top-k, min-p. Temperature and filters do not apply
    to greedy rows, so their log-probabilities are those at temperature 1.
    uniform_B_2: two uniforms in (0, 1) per row; None if all rows are greedy.
    seen_B_V: tokens of prompt and completion so far; None if no row has a repetition penalty.
    count_R_V: number of occurrences of each token in the completions of the rows of `parameters.count_penalties`.
    """
    x_B_V = logits_B_V.astype(mx.float32)
    if masks is not None:
        x_B_V = exclude_tokens(x_B_V, masks)
    x_B_V = process_logits(x_B_V, parameters, seen_B_V, count_R_V)
    if parameters.filters is not None:
        x_B_V = apply_filters(x_B_V, parameters.filters)
    token_B, logp_B, log_total_B = _drawn(x_B_V, uniform_B_2, parameters.greedy_B)
    sampled = SampledRows(token_B, logp_B)
    if parameters.alternatives is not None:
        sampled = SampledRows(token_B, logp_B, *_most_probable(x_B_V, log_total_B, parameters.alternatives))
    if parameters.recording is None:
        return sampled
    token_R_K = support_tokens(x_B_V[parameters.recording.row_R], parameters.recording.number)
    return sampled._replace(supports=Supports(parameters.recording.row_R, token_R_K))


@mx.compile
def _drawn(
    x_B_V: mx.array, uniform_B_2: mx.array | None, greedy_B: mx.array | None
) -> tuple[mx.array, mx.array, mx.array]:
    """Return a token per row, its log-probability, and the logarithm of the sum of exponentials of the row.

    Compiled, because it consists of many small operations. MLX keeps a graph per shape: one per number of rows.
    """
    peak_B_1 = mx.max(x_B_V, axis=-1, keepdims=True)
    weight_B_V = mx.exp(x_B_V - peak_B_1)
    if uniform_B_2 is None:
        token_B, total_B = mx.argmax(x_B_V, axis=-1), mx.sum(weight_B_V, axis=-1)
    else:
        token_B, total_B = choose_token(weight_B_V, uniform_B_2)
        if greedy_B is not None:
            token_B = mx.where(greedy_B, mx.argmax(x_B_V, axis=-1), token_B)
    token_B = token_B.astype(mx.int32)
    log_total_B = peak_B_1[:, 0] + mx.log(total_B)
    logp_B = mx.take_along_axis(x_B_V, token_B[:, None], axis=-1)[:, 0] - log_total_B
    return token_B, logp_B, log_total_B


def exclude_tokens(x_B_V: mx.array, masks: TokenMasks) -> mx.array:
    """Set the logits of tokens that may not be sampled to minus infinity. Other rows keep their logits."""
    word_R_W_1, row_R = mx.array(masks.word_R_W)[..., None], mx.array(masks.row_R)
    bit_R_W_K = mx.bitwise_and(mx.right_shift(word_R_W_1, mx.arange(32, dtype=mx.uint32)), 1)
    allowed_R_V = bit_R_W_K.reshape(len(masks.row_R), -1)[:, : x_B_V.shape[-1]].astype(mx.bool_)
    limit_R_V = mx.where(allowed_R_V, mx.inf, -mx.inf)
    return x_B_V.at[row_R].minimum(limit_R_V)


def process_logits(
    x_B_V: mx.array, parameters: RowParameters, seen_B_V: mx.array | None, count_R_V: mx.array | None = None
) -> mx.array:
    """Apply bias, temperature, CTRL's repetition penalty (arXiv:1909.05858, equation 4), and OpenAI's penalties."""
    if parameters.bias is not None:
        rows_B_1 = mx.arange(x_B_V.shape[0])[:, None]
        x_B_V = x_B_V.at[rows_B_1, parameters.bias.token_B_K].add(parameters.bias.value_B_K)
    if parameters.penalty_B is not None and seen_B_V is not None:
        penalty_B_1 = parameters.penalty_B[:, None]
        x_B_V = mx.where(seen_B_V, mx.where(x_B_V > 0, x_B_V / penalty_B_1, x_B_V * penalty_B_1), x_B_V)
    if parameters.count_penalties is not None and count_R_V is not None:
        row_R = mx.array(parameters.count_penalties.row_R)
        frequency_R_1 = mx.array(parameters.count_penalties.frequency_R)[:, None]
        presence_R_1 = mx.array(parameters.count_penalties.presence_R)[:, None]
        x_B_V = x_B_V.at[row_R].subtract(frequency_R_1 * count_R_V)
        x_B_V = x_B_V.at[row_R].subtract(presence_R_1 * (count_R_V > 0))
    if parameters.inverse_temperature_B is not None:
        x_B_V = x_B_V * parameters.inverse_temperature_B[:, None]
    return x_B_V


def apply_filters(x_B_V: mx.array, filters: Filters) -> mx.array:
    """Return the logits with those of excluded tokens at minus infinity. Only rows with filters are computed."""
    x_R_V = x_B_V if filters.row_R.size == x_B_V.shape[0] else x_B_V[filters.row_R]
    x_R_V = mx.where(filter_mask(x_R_V, filters), x_R_V, -mx.inf)
    return x_R_V if filters.row_R.size == x_B_V.shape[0] else _replaced(x_B_V, filters.row_R, x_R_V)


def _replaced(x_B_V: mx.array, row_R: mx.array, x_R_V: mx.array) -> mx.array:
    """Return an array with other values in some rows."""
    replaced = mx.array(x_B_V)  # assignment would change the caller's array
    replaced[row_R] = x_R_V
    return replaced


def filter_mask(x_R_V: mx.array, filters: Filters) -> mx.array:
    """Return which tokens top-p, top-k and min-p keep. Of equal logits, the lowest identifiers are kept.

    Each filter keeps a prefix of the tokens in descending order of probability, so all three together keep the
    shortest: top-p the fewest tokens whose probabilities reach p, top-k the first k, min-p those of at least min_p x
    the largest.
    """
    sorted_R_V = -mx.sort(-x_R_V, axis=-1)
    count_R_1 = filters.top_k_R[:, None]
    prob_R_V = mx.softmax(sorted_R_V, axis=-1)
    before_R_V = mx.cumsum(prob_R_V, axis=-1) - prob_R_V
    count_R_1 = mx.minimum(count_R_1, mx.sum(before_R_V < filters.top_p_R[:, None], axis=-1, keepdims=True))
    floor_R_1 = filters.min_p_R[:, None] * prob_R_V[:, :1]
    count_R_1 = mx.maximum(mx.minimum(count_R_1, mx.sum(prob_R_V >= floor_R_1, axis=-1, keepdims=True)), 1)
    last_R_1 = mx.take_along_axis(sorted_R_V, count_R_1 - 1, axis=-1)
    above_R_V = x_R_V > last_R_1
    tie_R_V = x_R_V == last_R_1
    spare_R_1 = count_R_1 - mx.sum(above_R_V, axis=-1, keepdims=True)
    return above_R_V | (tie_R_V & (mx.cumsum(tie_R_V.astype(mx.int32), axis=-1) <= spare_R_1))


def support_tokens(x_R_V: mx.array, width: int) -> mx.array:
    """Return tokens whose logit is finite: (R, width), uint32, ascending, filled up with `PADDING`."""
    number_V = mx.arange(x_R_V.shape[-1], dtype=mx.uint32)
    token_R_V = mx.where(x_R_V > -mx.inf, number_V, mx.array(PADDING, dtype=mx.uint32))
    return mx.sort(mx.partition(token_R_V, width - 1, axis=-1)[:, :width], axis=-1)


def choose_token(weight_B_V: mx.array, uniform_B_2: mx.array) -> tuple[mx.array, mx.array]:
    """Choose one index per row with probability proportional to its weight; return it and the row's total weight.

    Large vocabularies are sampled in two stages, a block and then a token in it, each with its own uniform: there is no
    prefix sum over the vocabulary, and sums stay short enough for float32.
    """
    rows, vocabulary = weight_B_V.shape
    if vocabulary <= ONE_STAGE:
        return invert_cdf(weight_B_V, uniform_B_2[:, :1])
    if vocabulary % BLOCK:
        weight_B_V = mx.pad(weight_B_V, [(0, 0), (0, BLOCK - vocabulary % BLOCK)])
    weight_B_N_K = weight_B_V.reshape(rows, -1, BLOCK)
    block_B, total_B = invert_cdf(mx.sum(weight_B_N_K, axis=-1), uniform_B_2[:, :1])
    inside_B_K = mx.take_along_axis(weight_B_N_K, block_B[:, None, None], axis=1)[:, 0]
    return block_B * BLOCK + invert_cdf(inside_B_K, uniform_B_2[:, 1:])[0], total_B


def invert_cdf(weight_B_N: mx.array, uniform_B_1: mx.array) -> tuple[mx.array, mx.array]:
    """Invert the distribution function of each row: the first index whose prefix sum exceeds uniform x total.

    Never returns an index of weight 0. If rounding leaves no prefix sum above the target, returns the largest weight.
    """
    prefix_B_N = mx.cumsum(weight_B_N, axis=-1)
    total_B_1 = prefix_B_N[:, -1:]
    above_B_N = (prefix_B_N > uniform_B_1 * total_B_1) & (weight_B_N > 0)
    index_B = mx.argmax(mx.where(above_B_N, mx.inf, weight_B_N), axis=-1)
    return index_B, total_B_1[:, 0]


def _most_probable(x_B_V: mx.array, log_total_B: mx.array, wanted: Reporting) -> tuple[mx.array, mx.array]:
    """Return the most probable tokens of the rows that report them, in arrays of all rows."""
    logp_R_V = x_B_V[wanted.row_R] - log_total_B[wanted.row_R][:, None]
    token_R_N, logp_R_N = alternatives(logp_R_V, wanted.number)
    shape = (x_B_V.shape[0], token_R_N.shape[1])
    token_B_N, logp_B_N = mx.zeros(shape, token_R_N.dtype), mx.full(shape, -mx.inf)
    return _replaced(token_B_N, wanted.row_R, token_R_N), _replaced(logp_B_N, wanted.row_R, logp_R_N)


def alternatives(logp_R_V: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` most probable tokens per row and their log-probabilities; ties by lowest identifier."""
    count = min(count, logp_R_V.shape[-1])
    token_R_N = mx.argsort(-logp_R_V, axis=-1)[:, :count]
    return token_R_N, mx.take_along_axis(logp_R_V, token_R_N, axis=-1)


GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1, MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Constants of SplitMix64 (Steele, Lea, Flood, 2014), used here as a counter-based generator."""

MANTISSA_BITS = 23
"""The midpoints of 2**23 equal intervals are exact in float32 and lie strictly inside (0, 1)."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


def uniforms(seed_B: NDArray[np.uint64], position_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return two uniforms per row, (B, 2), float32, in [2**-24, 1 - 2**-24]: a function of seed and token index."""
    counter_B_2 = position_B.astype(np.uint64)[:, None] * np.uint64(2) + np.array([1, 2], dtype=np.uint64)
    word_B_2 = mix(np.add(mix(seed_B)[:, None], counter_B_2 * GOLDEN_RATIO, dtype=np.uint64))
    cell_B_2 = (word_B_2 >> np.uint64(64 - MANTISSA_BITS)).astype(np.float32)
    return (cell_B_2 + np.float32(0.5)) * np.float32(2.0**-MANTISSA_BITS)


MAX_COMPLETIONS = 4096
"""Maximum number of completions of one request."""


def validate(request: SampleRequest, *, vocabulary: int, context: int, cache_tokens: int) -> int:
    """Check a request and return the maximum length of its completions: `max_tokens`, limited by the context length.

    cache_tokens: how many of `engine.kv_cache_tokens` a prompt and one completion can have.

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
    if request.constraint is not None:
        _check_constrained(request.sampling)
    _check_support(request, vocabulary)
    limit = min(request.sampling.max_tokens, context - len(request.prompt))
    if len(request.prompt) + limit > cache_tokens:
        message = (
            f"prompt and completion need up to {len(request.prompt) + limit} tokens; engine.kv_cache_tokens allows "
            f"{cache_tokens} of them"
        )
        raise RequestError(message, param="max_tokens")
    return limit


Bounded = msgspec.defstruct("Bounded", [(name, one.annotation) for name, one in PARAMETERS.items()], frozen=True)
"""The parameters with their bounds. msgspec prepares a struct once, and a bare type at every conversion."""


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
    try:
        msgspec.convert(sampling, Bounded, from_attributes=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        shown, allowed = reprlib.repr(getattr(sampling, name)), PARAMETERS[name].allowed
        raise RequestError(f"{name} is {shown}; allowed is {allowed} ({message})", param=name) from error
    if (low := below_least_positive(sampling)) is not None:
        message = f"{low} is {getattr(sampling, low):g}; allowed is {PARAMETERS[low].allowed}"
        raise RequestError(message, param=low)
    _check_tokens((token for token, _ in sampling.logit_bias), vocabulary, "logit_bias")
    _check_tokens(sampling.stop_token_ids, vocabulary, "stop_token_ids")
    _check_tokens(sampling.allowed_token_ids, vocabulary, "allowed_token_ids")
    _check_tokens(chain.from_iterable(sampling.bad_words), vocabulary, "bad_words")
    if sampling.min_tokens > sampling.max_tokens:
        message = f"min_tokens is {sampling.min_tokens}; max_tokens is {sampling.max_tokens}"
        raise RequestError(message, param="min_tokens")


def _check_constrained(sampling: Sampling) -> None:
    for name in ("allowed_token_ids", "ignore_eos"):
        if getattr(sampling, name):
            raise RequestError(f"{name} cannot be combined with a grammar", param=name)


def _check_support(request: SampleRequest, vocabulary: int) -> None:
    sampling = request.sampling
    if request.record_support and truncates(sampling, vocabulary) and not can_record_support(sampling):
        message = f"top_k is {sampling.top_k}; recorded supports need a top_k of 1 to {MAX_SUPPORT}"
        raise RequestError(message, param="top_k")
