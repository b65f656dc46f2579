"""Sequence classifiers in the form of the hub: the blocks of a language model, and a head with one output.

As `LlamaForSequenceClassification` of transformers: the value of a text is that of the head at its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from clotho.models.loading import find_model, open_base
from clotho.models.model_files import read_config
from clotho.settings.model import ModelSection
from protocols.errors import ModelError, visible

KIND = "ForSequenceClassification"
"""End of the names of such architectures in transformers."""


def open_classifier(section: ModelSection, *, read_weights: bool = True) -> tuple[nn.Module, Path]:
    """Build the classifier of a model directory or a repository; return it with its directory, not evaluated.

    Raises ModelError if it is not a classifier with one output, or cannot be read.
    """
    files = find_model(section.path)
    config = read_config(files) if files.is_dir() else {}
    named = config.get("architectures") or [""]
    if not str(named[0]).endswith(KIND):
        found = visible(str(named[0]), 60) or "no architecture"
        raise ModelError(
            f"reward model {section.path}: config.json names {found}, and a reward model is a sequence classifier, "
            f"such as Qwen3{KIND}"
        )
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and len(labels) != 1:
        raise ModelError(f"reward model {section.path} has {len(labels)} labels, and a reward model has one")
    model, _ = open_base(files, section, read_weights=read_weights, classes=_classes)
    return model, files


def _classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return the classes of mlx-lm for a configuration, with the head of a classifier."""
    language_model, arguments = _get_classes(config)

    class Classifier(nn.Module):
        """The blocks of a language model, and the head `score`."""

        def __init__(self, args: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            whole = language_model(args)
            self.model: nn.Module = whole.model
            self.score = nn.Linear(args.hidden_size, 1, bias=False)
            self._cleaned = getattr(whole, "sanitize", dict)

        @property
        def layers(self) -> Any:
            """The blocks."""
            return self.model.layers

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return the weights under the names of mlx-lm."""
            cleaned: dict[str, mx.array] = self._cleaned(weights)
            return cleaned

        def __call__(self, tokens_B_S: mx.array, cache: Any = None) -> mx.array:
            """Return the value behind every token: (B, S, 1)."""
            value_B_S_1: mx.array = self.score(self.model(tokens_B_S, cache))
            return value_B_S_1

    return Classifier, arguments
