"""Sections of a profile that say what is learned from what: model, policy, sampling, data, rewards.

A section's docstring has one line per key (`key: text`, or `key, key: text`); `--help` and `docs/configuration.md`
are generated from them.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import Positive, PositiveFloat
from protocols.sampling import Sampling


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[model] Which base model.

    path: a directory, or a repository of the Hugging Face hub.
    dtype: computing type; `auto` is float32 on the CPU and the checkpoint's own on a GPU.
    dequantize: expand a quantised base at load; much faster on the CPU, several times the memory.
    trust_remote_code: let the model and its tokenizer run code of their own.
    """

    path: Annotated[str, Meta(min_length=1)]
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    dequantize: bool = False
    trust_remote_code: bool = False


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy] What is trained.

    kind: `lora` and `dora` train an adapter (QLoRA where the base is quantised), `full` every weight.
    rank: of the adapter.
    ranks: other ranks for some modules, `name=rank` each, with names as in `target_modules`.
    scale: multiplies the adapter's output, as mlx-lm counts (absolute); without `scale` and `alpha` it is 10.
    alpha: as PEFT counts; give one of `scale` and `alpha`.
    scaling: what `alpha` means: `standard` is alpha / rank, `rank_stabilized` alpha / sqrt(rank) (rsLoRA).
    dropout: on the adapter's input, while gradients are computed.
    num_layers: how many blocks, from the last; -1 = all.
    target_modules: block-relative names such as `self_attn.q_proj`; empty = every linear layer of a block.
    train_embeddings, train_head: beside the adapter, train these weights in full too (not where they are quantised).
    grad_checkpoint: recompute each block's activations in the backward pass: less memory, more time.
    """

    kind: Literal["lora", "dora", "full"] = "lora"
    rank: Positive = 8
    ranks: tuple[Annotated[str, Meta(pattern=r"^[\w.]+=[1-9]\d*$", description="name=rank")], ...] = ()
    scale: PositiveFloat | None = None
    alpha: PositiveFloat | None = None
    scaling: Literal["standard", "rank_stabilized"] = "standard"
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    num_layers: Annotated[int, Meta(ge=-1)] = -1
    target_modules: tuple[str, ...] = ()
    train_embeddings: bool = False
    train_head: bool = False
    grad_checkpoint: bool = False

    @property
    def effective_scale(self) -> float:
        """The adapter's absolute scale, one for all modules whatever their ranks."""
        if self.scale is not None:
            return self.scale
        if self.alpha is None:
            return 10.0
        return self.alpha / (self.rank if self.scaling == "standard" else math.sqrt(self.rank))


class SamplingSection(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sampling] How rollouts are sampled; the keys of `protocols.sampling.Sampling`, and one more.

    group_size: completions per prompt.
    """

    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[data] Problems to train on and to be measured by: JSON lines, or one JSON list.

    train: file of the problems that are trained on.
    heldout: file of the problems that measure; empty = `heldout_fraction` of the training file is set aside.
    heldout_fraction: share of the training file that is set aside where `heldout` is empty.
    prompt_key, answer_key, type_key: column of the file.
    default_type: kind of a problem whose line names none.
    system: a system message put before every prompt; empty = none.
    shuffle: a new order every epoch, by seed; otherwise the file's order.
    """

    train: Annotated[str, Meta(min_length=1)]
    heldout: str = ""
    heldout_fraction: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    type_key: str = "type"
    default_type: str = "problem"
    system: str = ""
    shuffle: bool = True


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[rewards]] One reward function; a completion's reward is the weighted sum of those that apply.

    name: format, math_eval, jaccard, choice_correctness, exact; or `module:function`.
    weight: factor of its value in the sum.
    types: kinds of problem it applies to; empty = all.
    timeout_seconds: a call that takes longer discards its group.
    correct: its value 1.0 means that the answer is right: evaluation counts it.
    """

    name: Annotated[str, Meta(min_length=1)]
    weight: float = 1.0
    types: tuple[str, ...] = ()
    timeout_seconds: PositiveFloat = 10.0
    correct: bool = False
