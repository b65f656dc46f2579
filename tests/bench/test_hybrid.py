"""The hybrid policy begins as the embedded policy, but for its first layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from bench.studies.hybrid import EMBEDDED, HYBRID, begin
from profiles.maker.pretrain import make_model, text_layers

pytestmark = pytest.mark.needs_float32


def test_all_other_layers_compute_what_those_of_the_embedded_policy_do() -> None:
    """Gates of one half are undone by outputs of twice the size, and the new layer is the identity."""
    teacher, config = load_model(EMBEDDED)
    model = make_model(HYBRID, config["vocab_size"], seed=0)
    begin(model)
    hidden_B_T_D = text_layers(teacher)(mx.arange(3, 15)[None])
    x_B_T_D = teacher.model.layers[0](teacher.model.embed_tokens(mx.arange(3, 15)[None]), "causal")
    layers = text_layers(model)
    for layer in layers.layers[1:]:
        x_B_T_D = layer(x_B_T_D, None if layer.is_linear else "causal")
    np.testing.assert_allclose(np.array(layers.norm(x_B_T_D)), np.array(hidden_B_T_D), atol=1e-4)
