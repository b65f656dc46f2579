"""Rank 0 <-> other ranks: settings, weights, shares of a batch, and what a rank computes from its share.

Messages are msgpack. An array is (type, shape, bytes); weights are safetensors files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from attachments.ranks.sections import DistributedSection
from clotho.scoring.layouts.rows import PackedInputs, PaddedInputs
from clotho.scoring.layouts.shared_prefix import SharedInputs
from clotho.scoring.sequences import MicroBatch, RouteInputs, TokenTable
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.settings.model import ModelSection, PolicySection
from clotho.training.gradient import StepPosition
from clotho.training.objectives.loss import LossCoefficients

LAYOUTS: dict[str, Any] = {kind.__name__: kind for kind in (PaddedInputs, PackedInputs, SharedInputs)}
"""The inputs of a micro-batch by the name of their type."""


class Setup(Struct, frozen=True, kw_only=True, tag="setup"):
    """Rank 0 -> other rank, once: the sections of the profile of rank 0 that apply to every rank.

    model_fingerprint: of the model files of rank 0. memory_bytes: what the run needs at least. prevent_sleep,
    cache_limit_mib: of `memory`.
    """

    model: ModelSection
    policy: PolicySection
    learner: LearnerSection
    sampling: SamplingSection
    distributed: DistributedSection
    seed: int
    model_fingerprint: str
    memory_bytes: int
    prevent_sleep: bool
    cache_limit_mib: int


class RankWeights(Struct, frozen=True, kw_only=True, tag="weights"):
    """Rank 0 -> other rank: arrays of the trainable parameters, or of the reference policy, as a safetensors file.

    complete: whether these are the last arrays; large weights take several messages.
    """

    tensors: bytes
    reference: bool
    complete: bool


class SharePart(Struct, frozen=True, kw_only=True):
    """One micro-batch of a share, with its index in the minibatch and its fixed log-probabilities.

    routes: arrays of its `RouteInputs`, of the same layout; empty without routes. replays: whether they are replayed.
    """

    index: int
    table: TokenTable
    members: tuple[int, ...]
    group_B: NDArray[np.int32]
    layout: str
    inputs: tuple[NDArray[np.int32], ...]
    routes: tuple[NDArray[Any], ...] = ()
    replays: bool = False
    reference_N: NDArray[np.float32] | None = None
    proximal_N: NDArray[np.float32] | None = None
    reference_point: float = 0.0

    def micro_batch(self) -> MicroBatch:
        """Return the micro-batch."""
        kind, routes = LAYOUTS[self.layout], None
        if self.routes:
            *inputs, table_X_E, known_X = self.routes
            routes = RouteInputs(kind(*inputs), table_X_E, known_X, self.replays)
        return MicroBatch(
            table=self.table,
            members=self.members,
            group_B=self.group_B,
            inputs=kind(*self.inputs),
            routes=routes,
        )


def part(index: int, micro: MicroBatch) -> SharePart:
    """Return a micro-batch as a part of a share, without fixed log-probabilities."""
    routes = micro.routes
    return SharePart(
        index=index,
        table=micro.table,
        members=micro.members,
        group_B=micro.group_B,
        layout=type(micro.inputs).__name__,
        inputs=tuple(micro.inputs),
        routes=() if routes is None else (*routes.inputs, routes.table_X_E, routes.known_X),
        replays=routes is not None and routes.replays,
    )


class GradientShare(Struct, frozen=True, kw_only=True, tag="gradients"):
    """Rank 0 -> other rank: compute the gradient of these micro-batches with the newest weights.

    number: of the share; an answer names it. seed: of the random numbers of dropout.
    """

    number: int
    parts: tuple[SharePart, ...]
    loss_coefficients: LossCoefficients
    position: StepPosition
    token_gradients: bool
    seed: int


class LogprobsShare(Struct, frozen=True, kw_only=True, tag="logprobs"):
    """Rank 0 -> other rank: compute the log-probabilities of these micro-batches.

    reference: under the reference policy, instead of the newest weights.
    """

    number: int
    parts: tuple[SharePart, ...]
    reference: bool


class Add(Struct, frozen=True, kw_only=True, tag="add"):
    """Rank 0 -> other rank: every rank has computed its share; take part in the sum of the gradients."""

    number: int


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """Rank 0 -> other rank: the run has ended."""


class Lost(Struct, frozen=True, kw_only=True, tag="lost"):
    """Rank 0 -> other rank: another rank was lost, so that this one must end."""

    problem: str


Instruction = Setup | RankWeights | GradientShare | LogprobsShare | Add | End | Lost


class RankReady(Struct, frozen=True, kw_only=True, tag="ready"):
    """Other rank -> rank 0: the model is loaded. layout: names, types and shapes of its trainable parameters."""

    layout: str


class MicroBatchResult(Struct, frozen=True, kw_only=True):
    """The log-probabilities of the tokens of a micro-batch and, if requested, their gradients."""

    index: int
    logp_N: NDArray[np.float32]
    slope_N: NDArray[np.float32] | None = None
    cut_N: NDArray[np.uint8] | None = None


class Computed(Struct, frozen=True, kw_only=True, tag="computed"):
    """Other rank -> rank 0: a share is computed. The gradient stays at the rank until it is added.

    fingerprint: of the weights that it was computed with. loss, metrics: sums over the share. seconds: that it took.
    """

    number: int
    fingerprint: str
    results: tuple[MicroBatchResult, ...]
    seconds: float = 0.0
    loss: float = 0.0
    metrics: dict[str, tuple[float, ...]] = {}


class RankFailed(Struct, frozen=True, kw_only=True, tag="failed"):
    """Other rank -> rank 0: the rank cannot load the model or compute its share."""

    message: str
    exit_status: int


Answer = RankReady | Computed | RankFailed


class _Encoded(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _encode_array(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return _Encoded(array.dtype.str, array.shape, array.tobytes())
    raise NotImplementedError(f"{type(array).__name__} is no part of a message")


def _decode_array(kind: Any, encoded: Any) -> Any:
    dtype, shape, data = encoded
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_instructions = msgspec.msgpack.Decoder(Instruction, dec_hook=_decode_array)
_answers = msgspec.msgpack.Decoder(Answer, dec_hook=_decode_array)


def encode(message: Instruction | Answer) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_instruction(content: bytes) -> Instruction:
    """Return a message of rank 0."""
    instruction: Instruction = _instructions.decode(content)
    return instruction


def decode_answer(content: bytes) -> Answer:
    """Return a message of another rank."""
    answer: Answer = _answers.decode(content)
    return answer
