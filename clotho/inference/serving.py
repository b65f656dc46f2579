"""The model as it serves: without dropout, also while the learner has it in training mode between two turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn


@contextmanager
def serving(model: nn.Module) -> Iterator[None]:
    """Evaluate inside, and put the model back into training mode after if it was."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
