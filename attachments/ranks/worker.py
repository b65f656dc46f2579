"""The ranks other than 0: each computes its share of every batch with the weights that rank 0 sends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NoReturn

import mlx.core as mx
import numpy as np
import structlog
from msgspec.structs import replace

from attachments.ranks.membership import Membership
from attachments.ranks.messages import (
    Add,
    Computed,
    End,
    GradientShare,
    Instruction,
    LogprobsShare,
    Lost,
    MicroBatchResult,
    RankFailed,
    RankReady,
    RankWeights,
    Setup,
    decode_instruction,
    encode,
)
from attachments.ranks.sections import DistributedSection
from clotho.models.loading import find_model
from clotho.models.machine import limit_mlx_memory, memory_limit
from clotho.models.model_files import model_fingerprint
from clotho.models.parameters import Arrays, fingerprint, flat, layout, nested
from clotho.models.policy import Policy, TrainablePolicy, load_policy
from clotho.models.turns import TurnBudget
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import BaseReference, LearnerSection
from clotho.storage.tensors import parse_tensors
from clotho.training.gradient import FixedLogprobs, LearnerModel, LossConfig, MicroBatchGradient
from clotho.training.gradient import add_gradients as add
from clotho.training.objectives.functions import objective
from clotho.training.reference_policy import ReferencePolicy
from protocols.errors import ClothoError, ModelError, error_text
from training_run.records.failure_report import complain
from training_run.supervision.idle_sleep import no_idle_sleep

log = structlog.get_logger(actor="rank")


def run_rank() -> int:
    """Take part in a run until rank 0 ends it; return the exit status.

    Ctrl-C and the end of the terminal are for rank 0, which ends this rank when the run is drained.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    instructions: SimpleQueue[Instruction] = SimpleQueue()
    joined: Future[Membership] = Future()

    def receive(rank: int, content: bytes) -> None:
        instruction = decode_instruction(content)
        if isinstance(instruction, Lost):
            joined.result().end(instruction.problem)
        if isinstance(instruction, End):
            joined.result().expect_end()
        instructions.put(instruction)

    membership = Membership(DistributedSection(), receive=receive, exit_process=_exit)
    joined.set_result(membership)
    try:
        _follow(membership, instructions)
    except Exception as error:
        failed = _failure(error)
        complain(f"rank {membership.rank}: {failed.message}")
        membership.send(0, encode(failed))
        while not isinstance(instructions.get(), End):
            pass
        return failed.exit_status
    finally:
        membership.close()
    return 0


def _exit(status: int) -> NoReturn:
    os._exit(status)


def _failure(error: Exception) -> RankFailed:
    known = isinstance(error, ClothoError)
    message = error_text(error) if known else f"{type(error).__name__}: {error_text(error)}"
    return RankFailed(message=message, exit_status=error.exit_status if isinstance(error, ClothoError) else 1)


def _follow(membership: Membership, instructions: SimpleQueue[Instruction]) -> None:
    """Do what rank 0 says, until the run ends."""
    setup = instructions.get()
    if not isinstance(setup, Setup):
        return
    membership.apply(setup.distributed)
    with no_idle_sleep(enabled=setup.prevent_sleep):
        computer = ShareComputer(load(setup), setup.learner, setup.sampling)
        membership.send(0, encode(RankReady(layout=computer.layout)))
        while not isinstance(instruction := instructions.get(), End):
            if isinstance(instruction, Add):
                membership.add(computer.take_gradient())
            elif answer := computer.follow(instruction, abandoned=lambda: not instructions.empty()):
                membership.send(0, encode(answer))


def load(setup: Setup) -> Policy:
    """Load the model of the run. Raises ModelError if this machine cannot load it, or has other files."""
    if model_fingerprint(find_model(setup.model.path)) != setup.model_fingerprint:
        raise ModelError(f"{setup.model.path} is not the model of rank 0: copy the files of rank 0 to this machine")
    limit_mlx_memory(memory_limit(), held=setup.memory_bytes, cache=setup.cache_limit_mib * 2**20)
    keep_reference = isinstance(setup.learner.reference, BaseReference)
    return load_policy(setup.model, setup.policy, seed=setup.seed, keep_reference=keep_reference)


class ShareComputer:
    """Computes shares with the model of this rank. layout: names, types and shapes of the trainable parameters."""

    def __init__(self, policy: TrainablePolicy, learner: LearnerSection, sampling: SamplingSection) -> None:
        """Raises ProfileError if the objective cannot be imported."""
        model, self._settings, self._objective = policy.copy_model(), learner, objective(learner.objective)
        self._model = LearnerModel(
            model,
            TeacherForcing(model.model, model.vocab_size, layout=learner.layout),
            SamplingDistribution(sampling.temperature, sampling.logit_bias),
            TurnBudget(learner.max_turn_ms / 1000.0),  # nobody waits, but macOS ends long work of a GPU
        )
        self._reference = ReferencePolicy(policy, learner)
        self._parameters = policy.trainable()
        self._fingerprint = ""
        self._received: Arrays = {}
        self._gradient: MicroBatchGradient | None = None
        self.layout = layout(self._parameters)

    def follow(self, instruction: Instruction, *, abandoned: Callable[[], bool]) -> Computed | None:
        """Use new weights, or compute a share. abandoned: whether rank 0 has said something else since."""
        began, computed = time.monotonic(), None
        match instruction:
            case RankWeights():
                self.receive(instruction)
            case GradientShare():
                self._gradient = None
                computed = None if abandoned() else self.compute_gradient(instruction)
            case LogprobsShare():
                computed = None if abandoned() else self.compute_logprobs(instruction)
        return computed and replace(computed, seconds=time.monotonic() - began)

    def receive(self, weights: RankWeights) -> None:
        """Use these weights once they are complete."""
        self._received |= parse_tensors(weights.tensors)
        if not weights.complete:
            return
        arrays, self._received = self._received, {}
        if weights.reference:
            self._reference.restore(arrays)
        else:
            self._parameters = nested(arrays)
            self._fingerprint = fingerprint(self._parameters)

    def compute_gradient(self, share: GradientShare) -> Computed:
        """Compute the gradient of a share, which stays here."""
        mx.random.seed(share.seed)
        config = LossConfig(self._settings, self._objective, share.loss_coefficients)
        results = []
        for part in share.parts:
            fixed = FixedLogprobs(
                None if part.reference_N is None else mx.array(part.reference_N),
                None if part.proximal_N is None else mx.array(part.proximal_N),
                part.reference_point,
            )
            found = self._model.gradient(
                self._parameters,
                part.micro_batch(),
                fixed,
                loss_config=config,
                position=share.position,
                token_gradients=share.token_gradients,
            )
            self._gradient = add(self._gradient, found)
            results.append(_result(part.index, found))
        total = self._gradient
        sums = {} if total is None else {name: np.array(array).tolist() for name, array in total.metrics.items()}
        return Computed(
            number=share.number,
            fingerprint=self._fingerprint,
            results=tuple(results),
            loss=0.0 if total is None else float(total.loss),
            metrics={name: tuple(values) for name, values in sums.items()},
        )

    def take_gradient(self) -> Arrays:
        """Return the arrays of the gradient, zeros if the share was empty."""
        total, self._gradient = self._gradient, None
        if total is not None:
            return total.arrays
        zeros = {name: mx.zeros(array.shape) for name, array in flat(self._parameters).items()}
        mx.eval(zeros)
        return zeros

    def compute_logprobs(self, share: LogprobsShare) -> Computed:
        """Compute the log-probabilities of a share."""
        results = []
        if share.reference:
            self._reference.use(self._model.policy)
        else:
            self._model.policy.use(self._parameters)
        for part in share.parts:
            logp_N = self._model.logprobs(part.micro_batch())
            results.append(MicroBatchResult(index=part.index, logp_N=np.array(logp_N)))
        return Computed(number=share.number, fingerprint=self._fingerprint, results=tuple(results))


def _result(index: int, found: MicroBatchGradient) -> MicroBatchResult:
    slope_N = cut_N = None
    for tokens in found.tokens:
        slope_N, cut_N = np.array(tokens.slope_N), np.array(tokens.cut_N)
    return MicroBatchResult(index=index, logp_N=np.array(found.logp_N), slope_N=slope_N, cut_N=cut_N)
