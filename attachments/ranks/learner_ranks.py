"""Rank 0 of a data-parallel learner: it deals micro-batches to all ranks and adds the gradients.

Only rank 0 has a training state. Every other rank gets the weights that a gradient is computed with, whenever they
change, so that no rank can depart from the others: an update, a rollback, a resumed run and a rejected update are the
same for it. The fingerprint of the weights comes back with every share and is compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np
import structlog
from msgspec.structs import replace
from numpy.typing import NDArray

from attachments.ranks.gauges import RankGauge, RankGauges
from attachments.ranks.messages import (
    Add,
    Answer,
    Computed,
    End,
    GradientShare,
    LogprobsShare,
    MicroBatchResult,
    RankFailed,
    RankReady,
    RankWeights,
    Setup,
    SharePart,
    decode_answer,
    encode,
    part,
)
from attachments.ranks.sections import DISTRIBUTED
from clotho.models.parameters import Arrays, Parameters, fingerprint, flat, layout
from clotho.models.turns import TurnBudget
from clotho.scoring.layouts.micro_batches import positions
from clotho.scoring.sequences import MicroBatch
from clotho.settings.model import PolicySection
from clotho.storage.tensors import tensor_bytes
from clotho.training.gradient import FixedLogprobs, LossConfig, MicroBatchGradient, StepPosition, TokenGradient
from protocols.errors import ClothoError, ModelError, ProfileError, RankError
from protocols.sampling import derive
from training_run.profile.mounted import without_settings
from training_run.profile.schema import Profile
from training_run.supervision.lasting_thread import LastingThread

T = TypeVar("T")

log = structlog.get_logger(actor="learner")

LOOK_SECONDS = 1.0
"""How long the learner waits for other ranks before it looks whether the update was cancelled."""

MESSAGE_BYTES = 256 << 20
"""Arrays of weights are sent together up to this size."""


MAX_PIECES = 4
"""Number of micro-batches per rank up to which a minibatch is cut for unequal shares."""


def assign(costs: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Deal micro-batches to ranks, most expensive first, each to the rank that finishes it first.

    speeds: relative speed of each rank. Returns indices in ascending order. Rank 0 gets at least one, which it takes
    from the rank with the most if it is very slow. (Graham's LPT rule, 1969. With equal speeds, the largest share is at
    most 4/3 of the smallest possible one; with others, at most twice, Gonzalez, Ibarra and Sahni, 1977.)
    """
    shares: list[list[int]] = [[] for _ in speeds]
    work = [0] * len(speeds)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cost = max(1, costs[index])
        first = min(range(len(speeds)), key=lambda rank: (work[rank] + cost) / speeds[rank])
        shares[first].append(index)
        work[first] += cost
    if costs and not shares[0]:
        shares[0].append(max(shares, key=len).pop())
    return [sorted(share) for share in shares]


def grouped(arrays: Mapping[str, mx.array], limit: int = MESSAGE_BYTES) -> Iterator[dict[str, mx.array]]:
    """Split arrays into groups of at most `limit` bytes; a larger array has a group of its own. At least one group."""
    group: dict[str, mx.array] = {}
    size = 0
    for name, array in arrays.items():
        if group and size + array.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name], size = array, size + array.nbytes
    yield group


class RankGroup(Protocol):
    """The membership of rank 0 in a group of ranks; see `Membership`."""

    size: int

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to another rank; returns at once."""

    def add(self, arrays: Mapping[str, mx.array]) -> dict[str, NDArray[np.float32]]:
        """Return the sums of float32 arrays over all ranks."""

    def lose(self, rank: int | None, reason: str) -> None:
        """End the process because a rank was lost."""

    def resumable(self, run_directory: str) -> None:
        """Tell the supervisor that the run can be resumed from now on."""

    def expect_end(self) -> bool:
        """Ignore the end of other ranks from now on, because the run ends. False if the process is ending already."""
        ...

    def close(self) -> None:
        """Send the remaining messages and close the connections."""


class LearnerRanks:
    """All ranks, as the learner of rank 0 sees them. Implements `OtherRanks`.

    count: number of ranks, this one included. pieces: see `OtherRanks`; with unequal shares, as many as divide the work
    almost in their proportion.
    """

    def __init__(
        self,
        join: Callable[[Callable[[int, bytes], None]], RankGroup],
        *,
        share_seconds: float,
        shares: Sequence[float] = (),
    ) -> None:
        """Join the other ranks; blocks until all have joined. Raises ProfileError if `shares` has another length.

        join: called in the thread of the collectives, with the receiver of messages. share_seconds: time for the share
        of another rank after the own share. shares: relative work of each rank; empty: equal.
        """
        self._share_seconds = share_seconds
        self._answers: SimpleQueue[tuple[int, Answer]] = SimpleQueue()
        self._collectives = LastingThread("collectives")
        self._group = self._collectives.submit(lambda: join(self._receive)).result()
        self.count = self._group.size
        self._speeds = tuple(shares) or (1.0,) * self.count
        if len(self._speeds) != self.count:
            raise ProfileError(f"distributed.shares needs one value per rank: {len(shares)} given, {self.count} ranks")
        self.pieces = min(MAX_PIECES * self.count, math.ceil(sum(self._speeds) / min(self._speeds)))
        self._work = [RankGauge(name=str(rank)) for rank in range(self.count)]
        self._dealt_at = 0.0
        self._others = range(1, self.count)
        self._number = 0
        self._sent: Parameters | None = None
        self._sent_reference: Arrays | None = None
        self._fingerprint = ""
        self._sums, self._waited_seconds = 0, 0.0

    def set_up(self, profile: Profile, parameters: Parameters, *, model: str, memory_bytes: int) -> None:
        """Let all other ranks load the model, and wait until they have.

        model: fingerprint of the model files. memory_bytes: what the run needs at least. Raises ModelError if a rank
        cannot load the model, has other files, or other trainable parameters.
        """
        setup = Setup(
            model=profile.model,
            policy=without_settings(profile.policy, PolicySection),
            learner=profile.learner,
            sampling=profile.sampling,
            distributed=DISTRIBUTED.of(profile),
            seed=profile.seed,
            model_fingerprint=model,
            memory_bytes=memory_bytes,
            prevent_sleep=profile.monitor.prevent_sleep,
            cache_limit_mib=profile.memory.cache_limit_mib,
        )
        for rank in self._others:
            self._group.send(rank, encode(setup))
        waiting = set(self._others)
        while waiting:
            rank, answer = self._answers.get()
            if isinstance(answer, RankFailed):
                raise _error(rank, answer)
            if not isinstance(answer, RankReady) or answer.layout != layout(parameters):
                raise ModelError(f"rank {rank} has a model with other trainable parameters")
            waiting.discard(rank)
        log.info("ranks_joined", ranks=self.count)

    def resumable(self, run_directory: str) -> None:
        """The run can be resumed from now on if a rank is lost."""
        self._group.resumable(run_directory)

    def close(self) -> None:
        """End the other ranks."""
        if not self._group.expect_end():
            return
        for rank in self._others:
            self._group.send(rank, encode(End()))
        self._group.close()
        log.info(
            "ranks_ended",
            ranks=self.count,
            sums=self._sums,
            waited_seconds=round(self._waited_seconds, 3),
            sent_megabytes=round(sum(work.bytes_sent for work in self._work) / 1e6, 3),
        )

    def gauges(self) -> RankGauges:
        """Return the work of every rank so far. Thread-safe."""
        return RankGauges(waited_seconds=self._waited_seconds, ranks=tuple(map(replace, self._work)))

    def assign_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        fixed_logprobs: Sequence[FixedLogprobs],
        parameters: Parameters,
        *,
        loss_config: LossConfig,
        position: StepPosition,
        token_gradients: bool,
    ) -> Sequence[int]:
        """See `OtherRanks`."""
        self._send_weights(parameters)
        parts = [
            replace(
                part(index, micro),
                reference_N=_numpy(fixed.reference_N),
                proximal_N=_numpy(fixed.proximal_N),
                reference_point=fixed.reference_point,
            )
            for index, (micro, fixed) in enumerate(zip(micro_batches, fixed_logprobs, strict=True))
        ]

        def share(rank: int, own: tuple[SharePart, ...]) -> GradientShare:
            """Return the message with the micro-batches of one rank."""
            return GradientShare(
                number=self._number,
                parts=own,
                loss_coefficients=loss_config.loss_coefficients,
                position=position,
                token_gradients=token_gradients,
                seed=derive(position.version, "share", self._number, rank),
            )

        return self._assign(micro_batches, parts, share)

    def add_gradients(
        self, own: MicroBatchGradient, turns: TurnBudget
    ) -> tuple[MicroBatchGradient, dict[int, MicroBatchGradient]]:
        """See `OtherRanks`. Raises RankError if a rank fails, or has computed with other weights."""
        number = self._number
        computed = self._collect(turns)
        began = time.monotonic()
        for rank in self._others:
            self._tell(rank, encode(Add(number=number)))
        adding = self._collectives.submit(lambda: self._group.add(own.arrays))
        while not adding.done():
            with turns.outside():
                _wait(adding, LOOK_SECONDS)
            turns.pause()
        self._sums += 1
        self._waited_seconds += time.monotonic() - began
        arrays = {name: mx.array(array) for name, array in adding.result().items()}
        metrics = {name: np.array(sums, dtype=np.float32) for name, sums in own.metrics.items()}
        loss = float(own.loss)
        for answer in computed:
            loss += answer.loss
            for name, sums in answer.metrics.items():
                metrics[name] = metrics.get(name, np.float32(0)) + np.array(sums, dtype=np.float32)
        total = own._replace(
            arrays=arrays,
            loss=mx.array(loss, dtype=mx.float32),
            metrics={name: mx.array(sums) for name, sums in metrics.items()},
        )
        mx.eval(total)
        others = {result.index: _without_arrays(result) for answer in computed for result in answer.results}
        return total, others

    def assign_logprobs(
        self, micro_batches: Sequence[MicroBatch], parameters: Parameters | None, reference: Arrays
    ) -> Sequence[int]:
        """See `OtherRanks`."""
        if parameters is not None:
            self._send_weights(parameters)
        elif reference and not _same(reference, self._sent_reference):
            self._send(reference, reference=True)
            self._sent_reference = reference
        parts = [part(index, micro) for index, micro in enumerate(micro_batches)]

        def share(rank: int, own: tuple[SharePart, ...]) -> LogprobsShare:
            return LogprobsShare(number=self._number, parts=own, reference=parameters is None)

        return self._assign(micro_batches, parts, share)

    def collect_logprobs(self, turns: TurnBudget) -> dict[int, mx.array]:
        """See `OtherRanks`."""
        computed = self._collect(turns)
        return {result.index: mx.array(result.logp_N) for answer in computed for result in answer.results}

    def _assign(
        self,
        micro_batches: Sequence[MicroBatch],
        parts: Sequence[SharePart],
        share: Callable[[int, tuple[SharePart, ...]], GradientShare | LogprobsShare],
    ) -> Sequence[int]:
        self._number += 1
        costs = [positions(micro) for micro in micro_batches]
        shares = assign(costs, self._speeds)
        for rank in self._others:
            self._tell(rank, encode(share(rank, tuple(parts[index] for index in shares[rank]))))
        for work, dealt in zip(self._work, shares, strict=True):
            work.positions += sum(costs[index] for index in dealt)
        self._dealt_at = time.monotonic()
        return shares[0]

    def _collect(self, turns: TurnBudget) -> list[Computed]:
        """Wait for the answers of all other ranks to the newest shares. Answers to abandoned shares are dropped."""
        found: dict[int, Computed] = {}
        limit, began = self._share_seconds, time.monotonic()
        self._work[0].seconds += began - self._dealt_at
        due = began + limit
        while len(found) < self.count - 1:
            try:
                with turns.outside():
                    rank, answer = self._answers.get(timeout=max(0.0, min(LOOK_SECONDS, due - time.monotonic())))
            except Empty:
                if time.monotonic() >= due:
                    late = next(rank for rank in self._others if rank not in found)
                    self._group.lose(late, f"did not compute its share within {limit:g} s")
                turns.pause()
                continue
            if isinstance(answer, RankFailed):
                raise _error(rank, answer)
            if isinstance(answer, Computed) and answer.number == self._number:
                if answer.fingerprint != self._fingerprint:
                    raise RankError(f"rank {rank} computed its share with other weights than rank 0 sent")
                found[rank] = answer
                self._work[rank].seconds += answer.seconds
        self._waited_seconds += time.monotonic() - began
        return [found[rank] for rank in sorted(found)]

    def _send_weights(self, parameters: Parameters) -> None:
        if parameters is not self._sent:
            self._send(flat(parameters), reference=False)
            self._sent, self._fingerprint = parameters, fingerprint(parameters)

    def _send(self, arrays: Arrays, *, reference: bool) -> None:
        mx.eval(arrays)
        groups = list(grouped(arrays))
        for number, group in enumerate(groups, 1):
            complete = number == len(groups)
            content = encode(RankWeights(tensors=tensor_bytes(group), reference=reference, complete=complete))
            for rank in self._others:
                self._tell(rank, content)

    def _tell(self, rank: int, message: bytes) -> None:
        self._group.send(rank, message)
        self._work[rank].bytes_sent += len(message)

    def _receive(self, rank: int, content: bytes) -> None:
        self._answers.put((rank, decode_answer(content)))


def _wait(future: Future[Any], seconds: float) -> None:
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        return


def _error(rank: int, answer: RankFailed) -> ClothoError:
    kind = ModelError if answer.exit_status == ModelError.exit_status else RankError
    return kind(f"rank {rank}: {answer.message}")


def _same(arrays: Arrays, others: Arrays | None) -> bool:
    return others is not None and arrays.keys() == others.keys() and all(a is others[n] for n, a in arrays.items())


def _numpy(array_N: mx.array | None) -> NDArray[np.float32] | None:
    return None if array_N is None else np.array(array_N)


def _without_arrays(result: MicroBatchResult) -> MicroBatchGradient:
    tokens: tuple[TokenGradient, ...] = ()
    if result.slope_N is not None and result.cut_N is not None:
        tokens = (TokenGradient(mx.array(result.slope_N), mx.array(result.cut_N)),)
    return MicroBatchGradient(arrays={}, loss=mx.array(0.0), metrics={}, logp_N=mx.array(result.logp_N), tokens=tokens)
