"""Requests of Tinker's API, with the names of the SDK. Path and query of a request are fields too.

Requests with few fields are the arguments of the methods that answer them. Requests that sample or train refuse unknown
fields, because a setting without effect would be silent. The methods return objects of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from protocols.sampling import MAX_TOP_LOGPROBS

Answer = Mapping[str, Any]
"""An answer, or the result of a promise, as an object of JSON. Its arrays may be those of numpy."""

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
Ttl = Annotated[int, Meta(ge=1)]
Best = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Offset = Annotated[int, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=0, le=1000)]
Metadata = dict[str, Any]


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request whose fields all have an effect, or are refused. type: names the request once more."""

    type: str = ""


class NumberedCall(Strict, frozen=True):
    """A request of a model or of a sampling session. seq_id: its number there."""

    seq_id: int | None = None


class CreateSession(Struct, frozen=True, kw_only=True):
    """Tags and names describe the session, and choose nothing."""

    sdk_version: str = ""
    tags: list[str] = []
    user_metadata: Metadata | None = None
    display_name: str | None = None


class OfFuture(Struct, frozen=True, kw_only=True):
    """A request for a result."""

    request_id: str


class LoraFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter. train_unembed: accepted, without an adapter of the head: the head reads and writes no block."""

    rank: Annotated[int, Meta(ge=1)] = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFields(Struct, frozen=True, kw_only=True):
    """The optimizer of a model."""

    type: str = "adamw"


class CreateModel(Strict, frozen=True):
    """A new adapter."""

    session_id: str
    model_seq_id: Annotated[int, Meta(ge=0)]
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraFields | None = None
    optimizer_config: OptimizerFields = OptimizerFields()


class OfModel(NumberedCall, frozen=True, kw_only=True):
    """A request that concerns a model."""

    model_id: str


class AdamFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of AdamW, with Tinker's defaults. grad_clip_norm: 0 or less: none."""

    learning_rate: Annotated[float, Meta(ge=0.0)] = 1e-4
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.95
    eps: Annotated[float, Meta(gt=0.0)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfModel, frozen=True, kw_only=True):
    """One step. optimizer_params: of another optimizer, which is refused by its name."""

    adam_params: AdamFields | UnsetType = UNSET
    optimizer_params: OptimizerFields | UnsetType = UNSET


class Save(OfModel, frozen=True, kw_only=True):
    """What is saved under a name."""

    path: Name | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None


class SaveWeights(Save, frozen=True, kw_only=True):
    """The state of training."""

    overwrite: bool = False


class SaveForSampler(Save, frozen=True, kw_only=True):
    """Weights to sample from. Without `path`, they end with the session."""

    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(NumberedCall, frozen=True, kw_only=True):
    """A checkpoint for a model, or for a new model of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerFields = OptimizerFields()
    weights_access_token: str | None = None


class CreateSamplingSession(Strict, frozen=True):
    """What samples from the base model, or from a checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(Struct, frozen=True, kw_only=True):
    """Tokens of an input. Chunks of another type have no tokens, and are refused."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Struct, frozen=True, kw_only=True):
    """The tokens of a sequence, in chunks."""

    chunks: list[TextChunk]


class TensorFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor. Those with sparse indices have several targets for one position, and are refused."""

    data: list[float]
    dtype: Literal["float32", "int64", "int32"]
    shape: list[int] | None = None
    sparse_crow_indices: Any = None
    sparse_col_indices: Any = None


class DatumFields(Struct, frozen=True, kw_only=True):
    """A sequence."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorFields]


class LossData(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data of a loss."""

    data: Sequence[DatumFields]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackward(OfModel, frozen=True, kw_only=True):
    """A request for a gradient, or for log-probabilities only, which has `forward_input`."""

    forward_backward_input: LossData | None = None
    forward_input: LossData | None = None
    forward_only: bool = False


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a sequence is sampled. top_k: -1 keeps all tokens. stop: an empty list also disables end tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleCall(NumberedCall, frozen=True, kw_only=True):
    """Completions of a prompt."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1)] = 1
    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: Best = 0
    topk_sample_logprobs: Best = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class OfCheckpoint(Struct, frozen=True, kw_only=True):
    """A request that concerns a checkpoint."""

    run_id: str
    kind: str
    name: str
    ttl_seconds: Ttl | None = None
