"""The formats of adapters: names of files and tensors, layouts, scales, and what the configurations state.

A layer with weight W and an adapter computes y = W x + scale (x A) B. The formats store A and B like this:

    format   tensors                                             A                B                 scale
    mlx      MODULE.lora_a, MODULE.lora_b                        inputs x rank    rank x outputs    scale
    npz      as mlx                                              as mlx           as mlx            scale
    peft     base_model.model.MODULE.lora_A.weight, .lora_B...   rank x inputs    outputs x rank    alpha / rank
    gguf     blk.N.LAYER.weight.lora_a, ....lora_b               rank x inputs    outputs x rank    alpha / rank

The scale of rsLoRA (arXiv:2312.03732) in PEFT is alpha / sqrt(rank). A mixture of experts has A (experts, rank, inputs)
and B (experts, outputs, rank) in mlx, npz and gguf; PEFT stores the experts one by one. DoRA (arXiv:2402.09353) adds a
vector of magnitudes, one per output: MODULE.m in mlx and npz, MODULE.lora_magnitude_vector in PEFT. PEFT names the
matrices of an embedding MODULE.lora_embedding_A and MODULE.lora_embedding_B. It can store weights in full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from clotho.models.model_files import one_line
from clotho.storage.adapters import TENSORS
from protocols.checkpoint import AdapterKind, BaseQuantization
from protocols.errors import AdapterRequestError, visible

DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of tensors, with their bytes per value."""

Matrix = Literal["lora_a", "lora_b", "m"]
"""The tensors of an adapted layer: A, B, and the magnitudes of DoRA."""

LABELS: Mapping[AdapterKind, str] = {"lora": "LoRA", "dora": "DoRA"}
"""Methods by the name that configurations and settings have, as texts name them."""

TENSORS_OF: Mapping[AdapterKind, tuple[Matrix, ...]] = {"lora": ("lora_a", "lora_b"), "dora": ("lora_a", "lora_b", "m")}
"""The tensors that every layer has, by method."""

FormatName = Literal["mlx", "peft", "npz", "gguf"]


class Target(Struct, frozen=True, kw_only=True):
    """A layer that can have an adapter. experts: number of experts of a mixture; 0 for an ordinary layer.

    embedding: whether the layer looks up vectors. Its inputs are the tokens, its outputs the dimensions.
    """

    inputs: int
    outputs: int
    experts: int = 0
    embedding: bool = False

    def shape(self, matrix: Matrix, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor in mlx-lm's layout."""
        if matrix == "m":
            return (self.outputs,)
        if self.experts:
            return (self.experts, rank, self.inputs) if matrix == "lora_a" else (self.experts, self.outputs, rank)
        return (self.inputs, rank) if matrix == "lora_a" else (rank, self.outputs)


class TensorName(NamedTuple):
    """What the name of a tensor states. module: as the format names it. embedding: whether PEFT adapts an embedding."""

    module: str
    matrix: Matrix
    embedding: bool = False


class AdapterFormat(Struct, frozen=True, kw_only=True):
    """How a format names and stores the tensors of an adapter.

    tensors: name of the file in a directory. transposed: whether A is (rank, inputs) and B is (outputs, rank).
    stacked: whether the experts of a mixture share a tensor.
    """

    name: FormatName
    tensors: str
    names: re.Pattern[str]
    transposed: bool
    stacked: bool

    def parse(self, name: str) -> TensorName | None:
        """Return what the name of a tensor states; None if the format has no such name."""
        found = self.names.fullmatch(name)
        if found is None:
            return None
        matrix = MATRIX_OF.get(found["matrix"])
        return matrix and TensorName(found["module"], matrix, found["matrix"].startswith(EMBEDDING))

    def stored(self, target: Target) -> Target:
        """Return the layer that one tensor belongs to: without stacking, a single expert."""
        return target if self.stacked else Target(inputs=target.inputs, outputs=target.outputs)

    def shape(self, target: Target, matrix: Matrix, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor in the file."""
        layer = self.stored(target)
        shape = layer.shape(matrix, rank)
        return shape[::-1] if self.transposed and not layer.experts else shape


EMBEDDING = "lora_embedding_"
MATRIX_OF: Mapping[str, Matrix] = {
    "lora_a": "lora_a", "lora_b": "lora_b", "m": "m",
    "lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "m",
    f"{EMBEDDING}A": "lora_a", f"{EMBEDDING}B": "lora_b",
}  # fmt: skip

MLX_LM_NAMES = re.compile(r"(?P<module>.+)\.(?P<matrix>lora_[ab]|m)")
PEFT_NAMES = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?P<matrix>lora_[AB](?=(?:\.default)?\.weight$)|lora_embedding_[AB]|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
MLX = AdapterFormat(name="mlx", tensors=TENSORS, names=MLX_LM_NAMES, transposed=False, stacked=True)
NPZ = AdapterFormat(name="npz", tensors="adapter.npz", names=MLX_LM_NAMES, transposed=False, stacked=True)
PEFT = AdapterFormat(name="peft", tensors="adapter_model.safetensors", names=PEFT_NAMES, transposed=True, stacked=False)
GGUF = AdapterFormat(name="gguf", tensors="", names=MLX_LM_NAMES, transposed=True, stacked=True)
"""The names of llama.cpp depend on the architecture, so they are translated to those of mlx-lm first."""

TENSOR_FILES = (MLX.tensors, PEFT.tensors, NPZ.tensors)
"""The files with tensors in a directory of an adapter."""

EXPERT_NAME = re.compile(r"(?P<before>.+)\.experts\.(?P<expert>\d{1,5})\.(?P<layer>\w+)")
MIXTRAL_LAYERS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names of Mixtral's expert layers, and their names in mlx-lm."""


def stacked_module(module: str) -> tuple[str, int | None]:
    """Return the module of mlx-lm for the layer of one expert, and the expert; other modules as they are."""
    if (found := EXPERT_NAME.fullmatch(module)) is None:
        return module, None
    layer = MIXTRAL_LAYERS.get(found["layer"], found["layer"])
    return f"{found['before']}.switch_mlp.{layer}", int(found["expert"])


class _LoRAParameters(Struct, frozen=True, kw_only=True):
    """The part of mlx-lm's `lora_parameters` that changes what an adapter computes, and the dropout of its training."""

    scale: float
    dropout: float = 0.0


class MlxLmConfig(Struct, frozen=True, kw_only=True):
    """The part of mlx-lm's configuration that changes what an adapter computes, and what conversions keep.

    ranks, base_quantization: see `AdapterConfig`. base: name of the base model.
    """

    form: ClassVar[AdapterFormat] = MLX
    method_key: ClassVar[str] = "fine_tune_type"
    base_key: ClassVar[str] = "model"

    lora_parameters: _LoRAParameters
    method: AdapterKind = field(default="lora", name="fine_tune_type")
    trained_weights: tuple[str, ...] = ()
    ranks: dict[str, int] = field(default_factory=dict)
    base: str | None = field(default=None, name=base_key)
    base_quantization: BaseQuantization | None = None

    @property
    def dropout(self) -> float:
        """Dropout probability of the training."""
        return self.lora_parameters.dropout

    def scale(self, module: str, rank: int) -> float:
        """Return the absolute scale of a module."""
        return self.lora_parameters.scale


class PeftConfig(Struct, frozen=True, kw_only=True):
    """The part of PEFT's configuration that changes what an adapter computes, and what conversions keep."""

    form: ClassVar[AdapterFormat] = PEFT
    method_key: ClassVar[str] = "use_dora"
    base_key: ClassVar[str] = "base_model_name_or_path"
    ranks: ClassVar[Mapping[str, int]] = {}
    base_quantization: ClassVar[None] = None

    peft_type: str
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None
    dropout: float = field(default=0.0, name="lora_dropout")
    base: str | None = field(default=None, name=base_key)

    @property
    def method(self) -> AdapterKind:
        """The method by its name in settings."""
        return "dora" if self.use_dora else "lora"

    def scale(self, module: str, rank: int) -> float:
        """Return the absolute scale of a module. As in PEFT, the first pattern that matches the module counts."""
        alpha = self.lora_alpha
        for pattern, own in (self.alpha_pattern or {}).items():
            if is_named(module, pattern):
                alpha = own
                break
        return quotient(alpha, math.sqrt(rank) if self.use_rslora else rank)


Config = MlxLmConfig | PeftConfig


def config_type(fields: Mapping[str, object]) -> type[Config]:
    """Return the type of a configuration with these keys."""
    return PeftConfig if "peft_type" in fields else MlxLmConfig


UNSUPPORTED = (
    "lora_bias", "use_qalora", "target_parameters", "layer_replication", "trainable_token_indices",
    "alora_invocation_tokens",
)  # fmt: skip
"""Keys of PEFT that change what an adapter computes, and that are refused unless they are unset or false."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations of PEFT that subtract the initial adapter from the base weights, which the adapter's files lack."""

PATTERN = re.compile(r"[\w.]+")
"""A key of `alpha_pattern` that is a plain name. PEFT permits regular expressions."""


def parse_config(text: bytes, path: object) -> Config:
    """Read an adapter configuration of mlx-lm or PEFT. Raises AdapterRequestError unless it is LoRA or DoRA alone."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
        if config_type(fields) is PeftConfig:
            peft = msgspec.convert(fields, PeftConfig)
            _require_plain_peft(peft, fields, path)
            return peft
        kind, known = fields.get("fine_tune_type", "lora"), list(LABELS)
        if kind not in known:
            named = f"fine_tune_type is {visible(repr(kind), 40)}"
            raise invalid(f"{path}: {named}; only {' and '.join(known)} are adapters")
        config = msgspec.convert(fields, MlxLmConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"{path} is no adapter configuration of mlx-lm or PEFT: {one_line(error)}") from error
    if config.trained_weights:
        raise invalid(f"{path}: trained_weights is set; weights beside the adapter are not supported")
    return config


def invalid(message: str) -> AdapterRequestError:
    """Return the error for an adapter that cannot be used."""
    return AdapterRequestError(message, reason="invalid")


def _require_plain_peft(config: PeftConfig, fields: Mapping[str, object], path: object) -> None:
    if config.peft_type.upper() != "LORA":
        raise invalid(f"{path}: peft_type is {visible(config.peft_type, 40)}; only LORA is supported")
    for key, is_refused in (
        ("bias", fields.get("bias", "none") != "none"),
        ("init_lora_weights", str(fields.get("init_lora_weights")).lower().startswith(CHANGED_BASE)),
        ("alpha_pattern", not all(map(PATTERN.fullmatch, config.alpha_pattern or {}))),
        *((key, bool(fields.get(key))) for key in UNSUPPORTED),
    ):
        if is_refused:
            raise invalid(f"{path}: {key} is {visible(repr(fields[key]), 40)}, which is not supported")


def quotient(alpha: float, divisor: float) -> float:
    """Return alpha / divisor. A result within two units in the last place of a short decimal number is this number."""
    exact = alpha / divisor
    short = float(f"{exact:.12g}")
    return short if abs(short - exact) <= 2 * math.ulp(exact) else exact


BLOCK = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(?P<block>\d+)\.(?P<name>.+)")


def place_of(module: str) -> tuple[int | None, str]:
    """Return the block of a module, and its name in it; outside of the blocks None, and the full name."""
    found = BLOCK.fullmatch(module)
    return (int(found["block"]), found["name"]) if found else (None, module)


def is_named(module: str, key: str) -> bool:
    """Whether a module has a name that is relative to its block, or its full name."""
    return module == key or module.endswith(f".{key}")
