"""Make a hybrid policy for the default task: `python -m bench hybrid --out DIR [--seed 0]`.

Train it with `python pipeline.py --profile local-m3 --model DIR`.

Its layers are those of Qwen3.5: gated delta, attention, gated delta, attention. It begins with the weights of the
embedded policy. The first layer learns to give the outputs of the layer of attention in whose place it is, as in the
first stage of MOHAWK (arXiv:2408.10189). The third layer begins as the identity. Then the whole policy is trained on
the demonstrations of the embedded policy.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from bench.fingerprint import ROOT
from clotho.backend import backend
from profiles.embedded_maker.__main__ import problems
from profiles.embedded_maker.demonstrations import TUTORED_STEPS, demonstrate
from profiles.embedded_maker.problems import draw
from profiles.maker.pretrain import SHAPE, Batch, Lesson, Schedule, make_model, pretrain, save_model, text_layers
from profiles.maker.problem import Problem
from profiles.maker.tokenizer import PAD, save_tokenizer, token_id, train_tokenizer

EMBEDDED = ROOT / "profiles" / "embedded"

HYBRID: dict[str, Any] = {
    **SHAPE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": SHAPE["rope_theta"], "partial_rotary_factor": 1.0},
}
"""The shape: every head rotates as a whole, as in the embedded policy."""

LAYERS = (0, 1, None, 2)
"""For each layer, the layer of the embedded policy whose weights it has."""

ALIGNED = Schedule(steps=300, batch_size=32, learning_rate=5e-3, warmup_steps=20)
"""Updates of the first layer alone, the first half of them on careful demonstrations."""

ROUNDS = (
    (820, Schedule(steps=900, batch_size=32, learning_rate=1e-3, warmup_steps=20)),
    (55, Schedule(steps=95, batch_size=32, learning_rate=1e-3, warmup_steps=8)),
    (0, Schedule(steps=60, batch_size=32, learning_rate=1e-3, warmup_steps=5)),
)
"""Updates of the whole policy in rounds with a schedule each, and how many of them are on careful demonstrations."""


SEEDS_APART = 11
"""From the seed of the demonstrations of one round to that of the next."""


class Outputs:
    """The outputs of the first layer of attention of the embedded policy, and how far a layer is from them."""

    def __init__(self, teacher: Any, pad: int) -> None:
        self._embeddings, self._block, self._pad = teacher.model.embed_tokens, teacher.model.layers[0], pad

    def loss(self, layer: Any, parts: list[Batch]) -> mx.array:
        """Return the mean squared difference of the outputs, relative to their mean square; without padding."""
        difference, size = mx.array(0.0), mx.array(0.0)
        for part in parts:
            x_B_T_D = self._block.input_layernorm(self._embeddings(part.tokens_B_T))
            wanted_B_T_D = mx.stop_gradient(self._block.self_attn(x_B_T_D, mask="causal"))
            counts_B_T_1 = (part.tokens_B_T != self._pad)[..., None]
            difference += (mx.square(layer(x_B_T_D) - wanted_B_T_D) * counts_B_T_1).sum()
            size += (mx.square(wanted_B_T_D) * counts_B_T_1).sum()
        return difference / size


def begin(model: nn.Module) -> None:
    """Give a new model the weights of the embedded policy."""
    weights: Any = mx.load(str(EMBEDDED / "model.safetensors"))
    layers = text_layers(model)
    layers.embed_tokens.weight, layers.norm.weight = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    for layer, source in zip(layers.layers, LAYERS, strict=True):
        if layer.is_linear:
            _set_decay(layer.linear_attn)
        if source is None:
            layer.linear_attn.out_proj.weight = 0 * layer.linear_attn.out_proj.weight
            layer.mlp.down_proj.weight = 0 * layer.mlp.down_proj.weight
            continue
        start = f"model.layers.{source}."
        own = {name.removeprefix(start): array for name, array in weights.items() if name.startswith(start)}
        if layer.is_linear:
            own = {name: array for name, array in own.items() if not name.startswith("self_attn.")}
        else:
            queries = own["self_attn.q_proj.weight"].reshape(SHAPE["num_attention_heads"], SHAPE["head_dim"], -1)
            gated = mx.concatenate([queries, mx.zeros_like(queries)], axis=1)  # sigmoid(0) is a half
            own["self_attn.q_proj.weight"] = gated.reshape(-1, SHAPE["hidden_size"])
            own["self_attn.o_proj.weight"] = 2 * own["self_attn.o_proj.weight"]
        layer.load_weights(list(own.items()), strict=False)
    mx.eval(model.state)


def _set_decay(layer: Any) -> None:
    """Draw slow decays, as in Mamba-2 (arXiv:2405.21060): from 0.001 to 0.1 times a rate from 1 to 16 per token."""
    heads = (layer.num_v_heads,)
    layer.A_log = mx.log(mx.random.uniform(1, 16, heads))
    step_H = mx.exp(mx.random.uniform(math.log(1e-3), math.log(1e-1), heads))
    layer.dt_bias = step_H + mx.log(-mx.expm1(-step_H))  # softplus gives the step


def lesson(tutored: int, exclude: set[str]) -> Lesson:
    """Return demonstrations of which the first `tutored` updates have careful ones only."""

    def demonstrate_early(problem: Problem, rng: Random, step: int) -> str:
        return demonstrate(problem, rng, TUTORED_STEPS - tutored + step)

    return Lesson(draw=draw, demonstrate=demonstrate_early, exclude=exclude)


def main(arguments: Sequence[str] = ()) -> int:
    """Write the directory of the policy."""
    parser = argparse.ArgumentParser(prog="python -m bench hybrid", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and demonstrations")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    training, held_out = problems(chosen.seed)
    tokenizer = train_tokenizer(problem.prompt for problem in training)
    save_tokenizer(tokenizer, chosen.out, context=HYBRID["max_position_embeddings"])
    model, exclude = make_model(HYBRID, tokenizer.get_vocab_size(), chosen.seed), {one.prompt for one in held_out}
    begin(model)
    backend().install_layers(model)
    outputs = Outputs(load_model(EMBEDDED)[0], token_id(tokenizer, PAD))
    first = text_layers(model).layers[0].linear_attn
    pretrain(
        first, tokenizer, lesson(ALIGNED.steps // 2, exclude), ALIGNED, seed=chosen.seed + 1, objective=outputs.loss
    )
    for n, (tutored, schedule) in enumerate(ROUNDS):
        pretrain(model, tokenizer, lesson(tutored, exclude), schedule, seed=chosen.seed + SEEDS_APART * n)
    save_model(model, tokenizer, HYBRID, chosen.out)
    sys.stdout.write(f"written to {chosen.out}\n")
    return 0
