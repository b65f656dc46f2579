"""Tinker's losses as objectives of the library, and its data as completions.

All losses are sums over positions, of the token that a position predicts: not means. Notation: p_t its probability
under the newest weights, q_t under those that sampled it (`logprobs`), A_t its advantage, r_t = p_t / q_t.

    cross_entropy         sum_t -w_t log p_t                                     w: `weights`; 1 without them
    importance_sampling   sum_t -r_t A_t
    ppo                   sum_t -min(r_t A_t, clip(r_t, low, high) A_t)          low 0.8, high 1.2
    cispo                 sum_t -sg(clip(r_t, low, high)) A_t log p_t            low 0.8, high 1.2
    dro                   sum_t -(A_t log p_t - beta / 2 (log r_t)^2)            beta 0.05
    gspo                  sum_t -min(s A_t, clip(s, low, high) A_t), s = exp(mean_t log r_t) over the sequence

The first five are those of Tinker's documentation. The definition of its `gspo` is not public: this is GSPO
(arXiv:2507.18071) with the paper's range, 1 - 3e-4 and 1 + 4e-4, summed as the others are; `sequence_ratio_mask`
excludes tokens from the mean and from the sum. Departure: log r_t is at most 20 nats in absolute size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from attachments.tinker.bodies import DatumFields, LossData, TensorFields
from attachments.tinker.wire import text_tokens
from clotho.learner import Datum
from clotho.serving.errors import ApiError, invalid_field
from clotho.settings.bounds import Off
from clotho.settings.objectives import (
    Cispo,
    Custom,
    DppoTv,
    EnvironmentAdvantage,
    Grpo,
    Gspo,
    ObjectiveSettings,
    Reinforce,
)
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from clotho.training.objectives.functions import objective
from clotho.training.objectives.kl import bounded_log_ratio
from clotho.training.stepwise import Loss
from protocols.errors import did_you_mean, visible
from protocols.sampling import Completion

Config = Mapping[str, float]
SUM: Mapping[str, Any] = {"loss_aggregation": "sum", "advantage": EnvironmentAdvantage()}
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


def dro(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """Direct Reward Optimization (arXiv:2405.19107): the policy gradient with a quadratic penalty against the sampler.

    L_t = -(A_t log p_t - beta / 2 (log p_t - log q_t)^2), beta = settings.options["beta"].
    """
    log_ratio_N = bounded_log_ratio(logp_N, tokens.rollout_logp_N)
    gain_N = tokens.advantage_N * logp_N - 0.5 * settings.options["beta"] * mx.square(log_ratio_N)
    return PolicyLoss(-gain_N, mx.zeros_like(logp_N))


IMPORTANCE_SAMPLING = DppoTv(clip_low=1.0, clip_high=1.0, quadratic_kl=0.0, **SUM)
CROSS_ENTROPY = Reinforce(importance_correction=Off(), **SUM)


def _range(config: Config, low: float, high: float) -> dict[str, Any]:
    low, high = config.get(LOW, low), config.get(HIGH, high)
    if not 0.0 <= low < 1.0:
        raise invalid_field(LOW, f"{low:g} is not in [0, 1)")
    if not 1.0 < high < float("inf"):
        raise invalid_field(HIGH, f"{high:g} is not above 1")
    return {"clip_low": 1.0 - low, "clip_high": high - 1.0}


def _dro(config: Config) -> ObjectiveSettings:
    beta = config.get("beta", 0.05)
    if not 0.0 <= beta < float("inf"):
        raise invalid_field("beta", f"{beta:g} is not a number of at least 0")
    return Custom(function=f"{__name__}:dro", options={"beta": beta}, **SUM)


class LossFunction(Struct, frozen=True, kw_only=True):
    """One loss. make: its objective, from its settings. settings: their names. inputs: further ones of a datum."""

    make: Callable[[Config], Loss]
    settings: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ()


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(make=lambda _: "cross_entropy", inputs=(), optional=("weights",)),
    "importance_sampling": LossFunction(make=lambda _: IMPORTANCE_SAMPLING),
    "ppo": LossFunction(make=lambda c: Grpo(**_range(c, 0.8, 1.2), **SUM), settings=(LOW, HIGH)),
    "cispo": LossFunction(make=lambda c: Cispo(**_range(c, 0.8, 1.2), **SUM), settings=(LOW, HIGH)),
    "dro": LossFunction(make=_dro, settings=("beta",)),
    "gspo": LossFunction(
        make=lambda c: Gspo(
            ratio_reference="sampler", importance_correction=Off(), **_range(c, 1 - 3e-4, 1 + 4e-4), **SUM
        ),
        settings=(LOW, HIGH),
        optional=("sequence_ratio_mask",),
    ),
}
"""The losses that are served."""

REFUSED = {
    "stable_reinforce": "its definition is not public: use loss_fn = importance_sampling",
    "custom": "losses run in the client: use forward_backward_custom with a function, which takes two passes",
}
"""Names of the SDK that are refused, with the way out."""


class CheckedData(Struct, frozen=True, kw_only=True):
    """Checked data of one request. loss: `cross_entropy`, or an objective. longest: tokens of the longest row."""

    data: Sequence[Datum]
    loss: Loss
    tokens: int
    longest: int


def checked_batch(given: LossData, *, vocabulary: int, context: int) -> CheckedData:
    """Check a request, and return its data and its loss. Raises ApiError that names what is wrong."""
    name = given.loss_fn
    if name in REFUSED:
        raise invalid_field("loss_fn", f"{name} is not served; {REFUSED[name]}")
    if name not in LOSSES:
        shown, hint = visible(name, 60), did_you_mean(name, LOSSES)
        raise invalid_field("loss_fn", f"{shown!r} is unknown{hint}; one of {', '.join(LOSSES)}")
    loss, config = LOSSES[name], given.loss_fn_config or {}
    for key, value in config.items():
        if key not in loss.settings:
            raise invalid_field("loss_fn_config", f"{name} has no setting {visible(key, 60)!r}")
        if not isinstance(value, int | float):
            raise invalid_field("loss_fn_config", f"{key} is a number, not {visible(str(value), 60)!r}")
    chosen = loss.make({key: float(value) for key, value in config.items()})
    if not given.data:
        raise invalid_field("data", "is empty")
    data = [_datum(f"data[{i}]", row, loss, vocabulary, context) for i, row in enumerate(given.data)]
    lengths = [len(row.tokens) for row in data]
    return CheckedData(data=data, loss=chosen, tokens=sum(lengths), longest=max(lengths))


def _datum(place: str, row: DatumFields, loss: LossFunction, vocabulary: int, context: int) -> Datum:
    """Return the sequence of a row: its first token is the prompt, and its targets are the completion."""
    tokens, inputs = text_tokens(row.model_input.chunks), dict(row.loss_fn_inputs)
    N = len(tokens)
    if not N:
        raise invalid_field(place, "has no tokens")
    if context < N + 1:
        raise invalid_field(place, f"has {N + 1} tokens with its last target; the context length is {context}")
    target_N = _values(place, inputs, "target_tokens", N)
    names = [*loss.inputs, *(name for name in loss.optional if name in inputs)]
    given = {name: _values(place, inputs, name, N) for name in names}
    for name in inputs:
        raise invalid_field(f"{place}.loss_fn_inputs", f"{visible(name, 60)!r} has no effect in this loss")
    tokens = (*tokens, int(target_N[-1]))
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise invalid_field(place, f"has a token outside the vocabulary of {vocabulary}")
    if tokens[1:] != tuple(target_N.tolist()):
        raise invalid_field(
            f"{place}.target_tokens", "must be the next token at every position; give others weight 0, not another id"
        )
    weight_N = given.get("advantages", given.get("weights", np.ones(N)))
    completion = Completion(
        tokens=tokens[1:],
        logprobs=tuple(given.get("logprobs", np.zeros(N)).tolist()),
        versions=(0,) * N,
        text="",
        finish_reason="stop",
        sampled=tuple(given.get("sequence_ratio_mask", np.zeros(0)).astype(bool).tolist()),
    )
    return Datum(tokens[:1], completion, tuple(weight_N.tolist()))


def _values(place: str, inputs: dict[str, TensorFields], name: str, length: int) -> NDArray[np.float64]:
    """Take one input of a datum: finite, one number for each position."""
    if name not in inputs:
        raise invalid_field(f"{place}.loss_fn_inputs", f"{name} is missing")
    tensor, param = inputs.pop(name), f"{place}.{name}"
    shape = tensor.shape or [len(tensor.data)]
    if tensor.sparse_crow_indices or tensor.sparse_col_indices or shape not in ([shape[0]], [shape[0], 1]):
        raise invalid_field(param, "several targets for one position are not served; send one datum for each target")
    if not shape[0] == len(tensor.data) == length:
        raise invalid_field(param, f"has {len(tensor.data)} entries of shape {shape} for {length} tokens")
    found = np.array(tensor.data, dtype=np.float64)
    if not np.isfinite(found).all():
        raise invalid_field(param, "is not finite")
    return found


def loss_of(batch: CheckedData, logprobs: Sequence[Sequence[float]]) -> float:
    """Return the loss of a forward pass. logprobs: of each datum."""
    chosen: Any = CROSS_ENTROPY if batch.loss == "cross_entropy" else batch.loss
    completions = [cast(Completion, one.completion) for one in batch.data]

    def joined(rows: Sequence[Sequence[float]]) -> mx.array:
        return mx.array(np.concatenate([np.asarray(row, dtype=np.float32) for row in rows]))

    B, mask_N = len(completions), joined([one.sampled or (True,) * len(one.tokens) for one in completions])
    rollout_N = joined([one.logprobs for one in completions])
    tokens = ObjectiveInputs(
        old_logp_N=rollout_N,
        rollout_logp_N=rollout_N,
        advantage_N=joined([one.advantages for one in batch.data]),
        loss_mask_N=mask_N,
        sequence_N=mx.array(np.repeat(np.arange(B), [len(one.tokens) for one in completions]), dtype=mx.int32),
        sequences=B,
        group_B=mx.arange(B, dtype=mx.int32),
    )
    loss_N = objective(chosen)(joined(logprobs), tokens, chosen).loss_N
    return float(np.array(mx.sum(loss_N * mask_N)))


def require_adamw(kind: str) -> None:
    """Raise ApiError for an optimizer that is not served."""
    if kind != "adamw":
        raise ApiError(400, f"The optimizer {visible(kind, 40)!r} is not served; use adamw (AdamParams).")
