"""Settings of the model and of what is trained of it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.settings.bounds import FractionBelowOne, Off, Positive, PositiveFloat, Variant, about

Dtype = Literal["auto", "float32", "float16", "bfloat16"]


GradCheckpoint = bool | Literal["auto"]


Scaling = Literal["standard", "rank_stabilized"]


Rank = Annotated[str, Meta(pattern=r"^[\w.]+=[1-9]\d*$", title="name=rank")]


LARGE_MODEL = 100_000_000
"""Parameters from which on activations are recomputed by default.

Measured with SmolLM2-135M (`python -m bench real`): an update then takes 1.34 times as long, and 266 MB instead of
1.25 GB, which grows with the number and the width of the blocks. Smaller models need the time and not the memory.
"""


QuantizationMode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]


class QuantizeAtLoad(Variant, frozen=True, kw_only=True, tag="at_load"):
    """The weights of a full-precision model are quantized when it is loaded, as mlx_lm.convert does."""

    bits: Annotated[Positive | None, about("Bits per weight; none: that of the mode, 4 or 8.")] = None
    group_size: Annotated[Positive | None, about("Weights that share a scale; none: that of the mode.")] = None
    mode: Annotated[QuantizationMode, about("Format of the quantized weights.")] = "affine"


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base model."""

    path: Annotated[str, about("Model directory, GGUF file, package:NAME/FILE or hub repository.", min_length=1)]
    dtype: Annotated[Dtype, about("Type of computation; auto: float32 on the CPU, the checkpoint's on a GPU.")] = "auto"
    chat_template: Annotated[str, about("File of a chat template, or tools-hermes; empty: that of the model.")] = ""
    chat_template_kwargs: Annotated[dict[str, Any], about("Variables of the chat template, in every prompt.")] = {}
    dequantize: Annotated[bool, about("Expand a quantized model: faster on the CPU, more memory.")] = False
    quantize: Annotated[Off | QuantizeAtLoad, about("Quantization of a full-precision model.")] = Off()
    trust_remote_code: Annotated[bool, about("Run the Python code in the model's repository.")] = False


class AdapterMethod(Variant, frozen=True, kw_only=True):
    """A method that trains an adapter beside the weights of the base model."""

    rank: Annotated[Positive, about("Rank of the adapter; of an expert: divided by the experts per token.")] = 16
    ranks: Annotated[tuple[Rank, ...], about("Other ranks of modules that are named as in target_modules.")] = ()
    scale: Annotated[PositiveFloat | None, about("Factor of the adapter's output; none: that of alpha.")] = None
    alpha: Annotated[PositiveFloat, about("Numerator of the scale, as in PEFT.")] = 32.0
    scaling: Annotated[Scaling, about("Scale from alpha: alpha / rank, or alpha / sqrt(rank).")] = "standard"
    dropout: Annotated[FractionBelowOne, about("Dropout probability at the adapter's input.")] = 0.0
    num_layers: Annotated[int, about("Number of last transformer blocks with an adapter; -1: all.", ge=-1)] = -1
    target_modules: Annotated[
        tuple[str, ...], about("Layers with an adapter, such as q_proj; empty: all but routers.")
    ] = ()
    train_embeddings: Annotated[bool, about("Also train the token embeddings, if not quantized.")] = False
    train_head: Annotated[bool, about("Also train the output head, if not quantized.")] = False

    @property
    def effective_scale(self) -> float:
        """Absolute scale of the adapter, the same for all modules whatever their ranks."""
        if self.scale is not None:
            return self.scale
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
    adapter: Annotated[str, about("Adapter, checkpoint, RUN or RUN@STEP to start from; its rank and scale apply.")] = ""
    grad_checkpoint: Annotated[
        GradCheckpoint, about("Recompute activations of blocks: less memory, more time; auto: of large models.")
    ] = "auto"

    def recomputes(self, parameters: int) -> bool:
        """Whether blocks are recomputed; auto: of large models without dropout, which would be sampled anew."""
        if self.grad_checkpoint != "auto":
            return self.grad_checkpoint
        dropout = 0.0 if isinstance(self.method, FullMethod) else self.method.dropout
        return parameters >= LARGE_MODEL and dropout == 0.0
