"""What the replay of routes adds to the library: passes of the learner along the routes of the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.nn as nn

    from clotho.models.experts import Mixtures
    from clotho.scoring.teacher_forcing import RouterReplay


def router_replay(model: nn.Module, mixtures: Mixtures) -> RouterReplay | None:
    """Return what replays routes in a model with experts."""
    from attachments.router_replay.routed_blocks import RoutesOfModel

    return RoutesOfModel(model, mixtures)
