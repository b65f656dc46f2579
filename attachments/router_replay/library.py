"""What the replay of routes adds to the library: passes of the learner along the routes of the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mlx.nn as nn

    from clotho.models.experts import Mixtures
    from clotho.scoring.sequences import RouteInputs, TrainingSequence
    from clotho.scoring.teacher_forcing import RouterReplay


def router_replay(model: nn.Module, mixtures: Mixtures) -> RouterReplay | None:
    """Return what replays routes in a model with experts."""
    from attachments.router_replay.routed_blocks import RoutesOfModel

    return RoutesOfModel(model, mixtures)


def micro_batch_routes(
    sequences: Sequence[TrainingSequence],
    inputs_of: Callable[[Sequence[TrainingSequence]], list[NamedTuple]],
    replays: bool,
) -> list[RouteInputs]:
    """Return the routes of the micro-batches of sequences, of which some have routes."""
    from attachments.router_replay.micro_batches import routes_of_sequences

    return routes_of_sequences(sequences, inputs_of, replays)
