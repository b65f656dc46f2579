"""Sections of a profile about what is trained: model, policy, sampling, data and rewards."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import FractionBelowOne, Positive, PositiveFloat, Variant, about
from protocols.sampling import Sampling

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Scaling = Literal["standard", "rank_stabilized"]
RunIn = Literal["auto", "process", "thread"]
Rank = Annotated[str, Meta(pattern=r"^[\w.]+=[1-9]\d*$", title="name=rank")]


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base model."""

    path: Annotated[str, about("Model directory, GGUF file, package:NAME/FILE or hub repository.", min_length=1)]
    dtype: Annotated[Dtype, about("Type of computation; auto: float32 on the CPU, the checkpoint's on a GPU.")] = "auto"
    dequantize: Annotated[bool, about("Expand a quantized model: faster on the CPU, more memory.")] = False
    trust_remote_code: Annotated[bool, about("Run the Python code in the model's repository.")] = False


class AdapterMethod(Variant, frozen=True, kw_only=True):
    """A method that trains an adapter beside the weights of the base model."""

    rank: Annotated[Positive, about("Rank of the adapter.")] = 8
    ranks: Annotated[tuple[Rank, ...], about("Other ranks of modules that are named as in target_modules.")] = ()
    scale: Annotated[PositiveFloat | None, about("Factor of the adapter's output; 10 if alpha is none too.")] = None
    alpha: Annotated[PositiveFloat | None, about("Numerator of the scale, as in PEFT; excludes scale.")] = None
    scaling: Annotated[Scaling, about("Scale from alpha: alpha / rank, or alpha / sqrt(rank).")] = "standard"
    dropout: Annotated[FractionBelowOne, about("Dropout probability at the adapter's input.")] = 0.0
    num_layers: Annotated[int, about("Number of last transformer blocks with an adapter; -1: all.", ge=-1)] = -1
    target_modules: Annotated[tuple[str, ...], about("Layers with an adapter, such as q_proj; empty means all.")] = ()
    train_embeddings: Annotated[bool, about("Also train the token embeddings, if not quantized.")] = False
    train_head: Annotated[bool, about("Also train the output head, if not quantized.")] = False

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


Method = Annotated[Lora | Dora | FullMethod, about("Training method: LoRA, DoRA, or all weights.")]


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainable parameters."""

    method: Method = Lora()
    grad_checkpoint: Annotated[bool, about("Recompute activations of blocks: less memory, more time.")] = False


class SamplingSection(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of the rollouts."""

    group_size: Annotated[int, about("Number of completions per prompt.", ge=2, le=4096)] = 8


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems for training and evaluation, as JSON lines or one JSON list."""

    train: Annotated[str, about("File of the problems for training.", min_length=1)]
    heldout: Annotated[str, about("File of the held-out problems; empty: a part of data.train.")] = ""
    heldout_fraction: Annotated[FractionBelowOne, about("Fraction of data.train that is held out.")] = 0.1
    prompt_key: Annotated[str, about("Column of the prompt.", min_length=1)] = "prompt"
    answer_key: Annotated[str, about("Column of the correct answer.", min_length=1)] = "answer"
    type_key: Annotated[str, about("Column of the problem's type.", min_length=1)] = "type"
    default_type: Annotated[str, about("Type of problems whose line names no type.")] = "problem"
    system: Annotated[str, about("System message before every prompt; an empty text means none.")] = ""
    shuffle: Annotated[bool, about("Shuffle the problems in every epoch.")] = True


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward function; the reward of a completion is the weighted sum of those that apply."""

    name: Annotated[str, about("Name of a built-in function, module:function, or path/file.py:function.", min_length=1)]
    weight: Annotated[float, about("Weight of the reward function's value in the sum.")] = 1.0
    types: Annotated[tuple[str, ...], about("Types of problems with this reward; an empty list means all.")] = ()
    timeout_seconds: Annotated[PositiveFloat, about("A longer call discards its group.")] = 10.0
    correct: Annotated[bool, about("An answer counts as correct in evaluation if the value is 1.")] = False
    run_in: Annotated[RunIn, about("Where it runs; auto: your own in a process, others in a thread.")] = "auto"
    max_workers: Annotated[Positive | None, about("Largest number of worker processes; none means 8.")] = None
    memory_limit_mb: Annotated[Positive | None, about("Memory limit of a worker process in MB; none: 4096.")] = None
