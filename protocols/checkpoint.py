"""The JSON parts of a checkpoint: the state of the run and the adapter's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct, field

from protocols.accounting import LedgerState

Count = Annotated[int, Meta(ge=0)]
Word = Annotated[int, Meta(ge=0, lt=2**32)]

Value = TypeVar("Value", covariant=True)


class Part(Struct, Generic[Value], frozen=True, kw_only=True, eq=False):
    """What an attachment keeps in a checkpoint, in files of its own.

    value: a struct; `msgspec.Raw` in a checkpoint that was read. arrays: by name; evaluated, and never changed.
    """

    value: Value
    arrays: Mapping[str, Any] = {}


class RunState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpointer -> checkpoint. The run after `step` batches; with the tensors, all that a resumed run needs.

    version, fingerprint: of the weights.
    ledger: how each group ended. A resumed run prompts the other groups again.
    prompted: number of groups prompted since the run began.
    random_state: of the learner's thread, as 32-bit integers.
    bad_steps: consecutive updates that were not finite.
    train_seconds, sampled_tokens, trained_tokens: totals since the run began.
    inputs: fingerprints of `model`, `tokenizer` and `dataset`. A resumed run must have the same.
    received: number of groups received from each environment.
    in_flight: environment of each received group that has not ended, by group id.
    evaluated: step of each line of evaluations.jsonl up to `step`.
    """

    step: Count
    version: Count
    fingerprint: str
    ledger: LedgerState
    prompted: Count
    random_state: Annotated[tuple[Word, ...], Meta(min_length=2, max_length=2)]
    bad_steps: Count
    train_seconds: float
    sampled_tokens: Count
    trained_tokens: Count
    inputs: dict[str, str]
    received: dict[str, int] = {}
    in_flight: dict[int, str] = {}
    evaluated: tuple[int, ...] = ()


class BestCheckpoint(Struct, frozen=True, kw_only=True):
    """`best.json` of a run directory: the checkpoint with the highest held-out accuracy.

    accuracy: share of correct answers among `problems` held-out problems.
    """

    step: Count
    accuracy: float
    problems: Count


class Origin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`lineage.json` of a run directory: the weights that a run started from, if these are not the base model alone.

    path: the adapter directory, or the checkpoint of the forked run. sha256: digest of its tensors.
    step, run_id: of the forked run, or of the run that wrote the adapter. settings: keys that differ from the forked
    run, as `key: old -> new`. inputs: names of the inputs (model, tokenizer, dataset) that differ.
    base_model: the base model that the adapter's file names.
    """

    kind: Literal["adapter", "fork"]
    path: str
    sha256: str
    step: int | None = None
    run_id: str = ""
    format: str = ""
    base_model: str = ""
    settings: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


class LoRAParameters(Struct, frozen=True, kw_only=True):
    """The `lora_parameters` of mlx-lm: y = W x + scale * (x A) B.

    rank: the largest rank of any module, and the rank of every module in files.
    scale: the absolute factor, not alpha / rank.
    keys: names of the adapted modules, relative to their block.
    """

    rank: int
    scale: float
    dropout: float
    keys: tuple[str, ...]


class BaseQuantization(Struct, frozen=True, kw_only=True):
    """How the base model was quantized at load (`model.quantize`)."""

    bits: int
    group_size: int
    mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"]


AdapterKind = Literal["lora", "dora"]


class AdapterConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`adapter_config.json`, as `mlx_lm.load(base, adapter_path=...)` reads it. A resumed run compares it.

    num_layers: number of adapted blocks, counted from the last; -1 for all.
    lora_parameters: None for full-weight training.

    mlx-lm ignores the remaining fields.
    ranks: rank of each module whose rank is below `lora_parameters.rank`, by its name in `keys`, or by its whole name
    if blocks differ.
    trained_weights: names of weights that are trained in full beside the adapter.
    model: the base model. base_quantization: how it was quantized at load; None if it was not.
    run_id: the run that wrote the adapter; empty in checkpoints.
    """

    fine_tune_type: AdapterKind | Literal["full"]
    num_layers: int
    lora_parameters: LoRAParameters | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    trained_weights: tuple[str, ...] = ()
    model: str = ""
    base_quantization: BaseQuantization | None = None
    run_id: str = ""
