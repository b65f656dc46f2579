"""Sections of a profile about what is trained: model, policy, sampling, data and rewards."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import FractionBelowOne, Positive, PositiveFloat, Variant
from protocols.sampling import Sampling


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[model] The base model."""

    path: Annotated[str, Meta(min_length=1, description="Directory of the base model, or its Hugging Face repository.")]
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="Type of computation; auto is float32 on the CPU and the checkpoint's type on a GPU."),
    ] = "auto"
    dequantize: Annotated[
        bool, Meta(description="Expand a quantized base model on loading: faster on the CPU, several times the memory.")
    ] = False
    trust_remote_code: Annotated[bool, Meta(description="Run the Python code in the model's repository.")] = False


class AdapterMethod(Variant, frozen=True, kw_only=True):
    """A method that trains an adapter beside the weights of the base model."""

    rank: Annotated[Positive, Meta(description="Rank of the adapter.")] = 8
    ranks: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[\w.]+=[1-9]\d*$", title="name=rank")], ...],
        Meta(description="Other ranks for some modules, as name=rank with names as in target_modules."),
    ] = ()
    scale: Annotated[
        PositiveFloat | None,
        Meta(description="Factor of the adapter's output, as in mlx-lm; without scale and alpha it is 10."),
    ] = None
    alpha: Annotated[
        PositiveFloat | None, Meta(description="Numerator of the adapter's scale, as in PEFT; excludes scale.")
    ] = None
    scaling: Annotated[
        Literal["standard", "rank_stabilized"],
        Meta(description="Scale that alpha stands for: alpha / rank, or alpha / sqrt(rank) if rank_stabilized."),
    ] = "standard"
    dropout: Annotated[FractionBelowOne, Meta(description="Dropout probability at the adapter's input.")] = 0.0
    num_layers: Annotated[
        int, Meta(ge=-1, description="Number of transformer blocks with an adapter, from the last; -1 means all.")
    ] = -1
    target_modules: Annotated[
        tuple[str, ...],
        Meta(description="Linear layers with an adapter, such as self_attn.q_proj or q_proj; an empty list means all."),
    ] = ()
    train_embeddings: Annotated[bool, Meta(description="Also train the token embeddings, if not quantized.")] = False
    train_head: Annotated[bool, Meta(description="Also train the output head, if not quantized.")] = False

    @property
    def effective_scale(self) -> float:
        """Absolute scale of the adapter, the same for all modules whatever their ranks."""
        if self.scale is not None:
            return self.scale
        if self.alpha is None:
            return 10.0
        return self.alpha / (self.rank if self.scaling == "standard" else math.sqrt(self.rank))


class Lora(AdapterMethod, frozen=True, kw_only=True, tag="lora"):
    """LoRA (arXiv:2106.09685); QLoRA if the base model is quantized."""


class Dora(AdapterMethod, frozen=True, kw_only=True, tag="dora"):
    """DoRA (arXiv:2402.09353), which also trains the magnitude of each weight column."""


class FullMethod(Variant, frozen=True, kw_only=True, tag="full"):
    """All weights of the base model are trained."""


Method = Annotated[Lora | Dora | FullMethod, Meta(description="Training method: LoRA, DoRA, or all weights.")]


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy] The trainable parameters."""

    method: Method = Lora()
    grad_checkpoint: Annotated[
        bool, Meta(description="Recompute each block's activations in the backward pass: less memory, more time.")
    ] = False


class SamplingSection(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sampling] Sampling parameters of the rollouts."""

    group_size: Annotated[int, Meta(ge=2, le=4096, description="Number of completions per prompt.")] = 8


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[data] Problems for training and evaluation, as JSON lines or one JSON list."""

    train: Annotated[str, Meta(min_length=1, description="File of the problems for training.")]
    heldout: Annotated[
        str, Meta(description="File of the held-out problems; if empty, heldout_fraction of data.train is held out.")
    ] = ""
    heldout_fraction: Annotated[
        FractionBelowOne, Meta(description="Fraction of data.train that is held out if data.heldout is empty.")
    ] = 0.1
    prompt_key: Annotated[str, Meta(min_length=1, description="Column of the prompt.")] = "prompt"
    answer_key: Annotated[str, Meta(min_length=1, description="Column of the correct answer.")] = "answer"
    type_key: Annotated[str, Meta(min_length=1, description="Column of the problem's type.")] = "type"
    default_type: Annotated[str, Meta(description="Type of problems whose line names no type.")] = "problem"
    system: Annotated[str, Meta(description="System message before every prompt; an empty text means none.")] = ""
    shuffle: Annotated[bool, Meta(description="Shuffle the problems in every epoch.")] = True


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[rewards]] One reward function; the reward of a completion is the weighted sum of those that apply."""

    name: Annotated[
        str,
        Meta(min_length=1, description="Name of a built-in function, module:function, or path/file.py:function."),
    ]
    weight: Annotated[float, Meta(description="Weight of the reward function's value in the sum.")] = 1.0
    types: Annotated[
        tuple[str, ...], Meta(description="Types of problems that the function applies to; an empty list means all.")
    ] = ()
    timeout_seconds: Annotated[PositiveFloat, Meta(description="A longer call discards its group.")] = 10.0
    correct: Annotated[bool, Meta(description="An answer counts as correct in evaluation if the value is 1.")] = False
    run_in: Annotated[
        Literal["auto", "process", "thread"],
        Meta(description="Where the function runs; auto is process for your own functions, thread for built-in ones."),
    ] = "auto"
    max_workers: Annotated[
        Positive | None, Meta(description="Largest number of worker processes; without a value it is 8.")
    ] = None
    memory_limit_mb: Annotated[
        Positive | None, Meta(description="Memory in MB at which a worker process is ended; without a value 4096.")
    ] = None
