"""The optimizer steps of one update: gradient after gradient over its mini-batches and epochs."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Parameters, flat, nested
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.training.batch import MiniBatch
from clotho.training.gradient import Gradient, LearnablePolicy, Moment, Rules, add, micro_gradient
from clotho.training.optimizers.clipping import clip_scale, global_norm
from clotho.training.optimizers.compiled import Stepper
from clotho.training.optimizers.state import OptimizerState
from clotho.training.prepare import PreparedBatch
from clotho.training.update_metrics import Tally


class Moved(NamedTuple):
    """Where optimizer steps have led.

    steps: those that had a gradient other than zero. gradients: of the last of them, by parameter name; none at first.
    start: log-probabilities of the tokens of each micro-batch of the first mini-batch, at the weights before any step.
    """

    parameters: Parameters
    optimizer: OptimizerState
    steps: int
    gradients: dict[str, mx.array]
    start: tuple[mx.array, ...]


def optimize(
    batch: PreparedBatch,
    start: Moved,
    *,
    policy: LearnablePolicy,
    forcing: TeacherForcing,
    stepper: Stepper,
    rules: Rules,
    version: int,
    rate: float,
    tally: Tally,
) -> Generator[None, None, Moved | None]:
    """Take a step for every mini-batch of every epoch; None where loss or gradient of one was not finite.

    version: of the weights that the update begins with. tally: adds up what the steps report. A gradient of exactly
    zero is no step: momentum would make one of it. Yields after every micro-batch, served weights in the model.
    """
    moved = start
    count = rules.settings.update_epochs * len(batch.mini_batches)
    for number in range(count):
        index = number % len(batch.mini_batches)
        moment = Moment(version, number / count)
        total: Gradient | None = None
        for micro, known in zip(batch.mini_batches[index].micro_batches, batch.known[index], strict=True):
            part = micro_gradient(policy, forcing, moved.parameters, micro, known, rules=rules, moment=moment)
            total = add(total, part)
            if number == 0:
                moved = moved._replace(start=(*moved.start, part.logp_N))
            yield
        assert total is not None
        norm = float(np.array(global_norm(total.arrays)))
        mini = batch.mini_batches[index]
        taught = sum(micro.table.taught for micro in mini.micro_batches)
        if not tally.add(total.sums, tokens=mini.tokens, fresh=_fresh(mini, moment), taught=taught, norm=norm):
            return None
        if norm > 0.0:
            moved = _step(moved, total, stepper, rate=rate, scale=clip_scale(norm, rules.settings.max_grad_norm))
    return moved


def _step(moved: Moved, total: Gradient, stepper: Stepper, *, rate: float, scale: float) -> Moved:
    parameters, optimizer = stepper(
        flat(moved.parameters), total.arrays, moved.optimizer, learning_rate=rate, scale=scale
    )
    mx.eval(parameters, optimizer.slots, optimizer.master)
    return Moved(nested(parameters), optimizer, moved.steps + 1, total.arrays, moved.start)


def _fresh(mini: MiniBatch, moment: Moment) -> int:
    """Tokens of a mini-batch that the learner's own weights drew, where it still has them."""
    if moment.progress > 0:
        return 0
    tables = [micro.table for micro in mini.micro_batches]
    return sum(int(((table.version_N == moment.version) * table.weight_N).sum()) for table in tables)
