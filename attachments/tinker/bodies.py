"""Requests and answers of Tinker's API in JSON, with the names of the SDK.

Requests that sample or train refuse unknown fields, because a setting without effect would be silent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""A name of a checkpoint."""

Ttl = Annotated[int, Meta(ge=1)]
Metadata = dict[str, Any]


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request whose fields all have an effect, or are refused."""


class Call(Strict, frozen=True):
    """A request of a model or sampling session. seq_id: its number there. type: names the request once more."""

    seq_id: int | None = None
    type: str = ""


class CreateSession(Struct, frozen=True, kw_only=True):
    """POST create_session. Tags and names describe the session, and choose nothing."""

    sdk_version: str = ""
    tags: list[str] = []
    user_metadata: Metadata | None = None
    display_name: str | None = None


class SessionCall(Struct, frozen=True, kw_only=True):
    """POST session_heartbeat."""

    session_id: str


class LoraFields(Strict, frozen=True):
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
    """POST create_model."""

    session_id: str
    model_seq_id: Annotated[int, Meta(ge=0)]
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraFields | None = None
    optimizer_config: OptimizerFields = OptimizerFields()
    type: str = "create_model"


class ModelCall(Struct, frozen=True, kw_only=True):
    """POST get_info and unload_model."""

    model_id: str


class AdamFields(Strict, frozen=True):
    """One step of AdamW, with Tinker's defaults. grad_clip_norm: 0 or less: none."""

    learning_rate: Annotated[float, Meta(ge=0.0)] = 1e-4
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.95
    eps: Annotated[float, Meta(gt=0.0)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Call, frozen=True, kw_only=True):
    """POST optim_step. optimizer_params: of another optimizer, which is refused by its name."""

    model_id: str
    adam_params: AdamFields | UnsetType = UNSET
    optimizer_params: OptimizerFields | UnsetType = UNSET


class SaveWeights(Call, frozen=True, kw_only=True):
    """POST save_weights."""

    model_id: str
    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Call, frozen=True, kw_only=True):
    """POST save_weights_for_sampler. path: keep the weights under this name; without one, for this session."""

    model_id: str
    path: Name | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None


class LoadWeights(Call, frozen=True, kw_only=True):
    """POST load_weights: onto a model, or as a new model of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerFields | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Strict, frozen=True):
    """POST create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: str = "create_sampling_session"


class TextChunk(Struct, frozen=True, kw_only=True):
    """Tokens of an input. Chunks of another type have no tokens, and are refused."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Struct, frozen=True, kw_only=True):
    """The tokens of a sequence, in chunks."""

    chunks: list[TextChunk]


class SamplingParams(Strict, frozen=True):
    """How a sequence is sampled. top_k: -1 keeps all tokens. stop: an empty list also disables end tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleCall(Call, frozen=True, kw_only=True):
    """POST asample."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1)] = 1
    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Meta(ge=0)] = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class RetrieveFuture(Struct, frozen=True, kw_only=True):
    """POST retrieve_future and cancel_future."""

    request_id: str


class WeightsPath(Struct, frozen=True, kw_only=True):
    """POST weights_info."""

    tinker_path: str


class CopyWeights(Struct, frozen=True, kw_only=True):
    """POST copy_weights."""

    source_path: str


class TtlCall(Struct, frozen=True, kw_only=True):
    """PUT .../ttl."""

    ttl_seconds: Ttl | None = None


class ClientConfig(Struct, frozen=True, kw_only=True):
    """What clients do. Chunks of data arrive one after the other, and are small enough for `server.max_body_bytes`."""

    fwdbwd_max_chunk_bytes_count: int
    sample_max_concurrent_requests: int
    use_pyqwest_transport: bool = False
    parallel_fwdbwd_chunks: bool = False
    proto_compress_fwdbwd: bool = False


class SessionCreated(Struct, frozen=True, kw_only=True, tag="create_session"):
    """The answer of create_session."""

    session_id: str


class SupportedModel(Struct, frozen=True, kw_only=True):
    """A name of the base model."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class Capabilities(Struct, frozen=True, kw_only=True):
    """The answer of get_server_capabilities."""

    supported_models: list[SupportedModel]


class Promise(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of a request whose result retrieve_future returns."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class TryAgain(Struct, frozen=True, kw_only=True, tag="try_again"):
    """The answer of retrieve_future, with status 408, while there is no result."""

    request_id: str
    queue_state: str = "active"


class FailedRequest(Struct, frozen=True, kw_only=True):
    """The result of a request that failed. category: `user` or `server`."""

    error: str
    category: str


class ModelCreated(Struct, frozen=True, kw_only=True, tag="create_model"):
    """The result of create_model."""

    model_id: str


class Unloaded(Struct, frozen=True, kw_only=True, tag="unload_model"):
    """The result of unload_model."""

    model_id: str


class Stepped(Struct, frozen=True, kw_only=True, tag="optim_step"):
    """The result of optim_step."""

    metrics: dict[str, float]


class Saved(Struct, frozen=True, kw_only=True):
    """The result of save_weights and of load_weights."""

    path: str
    type: str
    model_id: str | None = None


class SavedForSampler(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="save_weights_for_sampler"):
    """The result of save_weights_for_sampler."""

    path: str | None = None
    sampling_session_id: str | None = None


class SamplingSession(Struct, frozen=True, kw_only=True, tag="create_sampling_session"):
    """The answer of create_sampling_session."""

    sampling_session_id: str


class SamplerInfo(Struct, frozen=True, kw_only=True):
    """The answer of GET samplers/{id}."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class ModelData(Struct, frozen=True, kw_only=True):
    """The base model of an adapter. tokenizer_id: a directory of this machine, or a name on the hub."""

    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Struct, frozen=True, kw_only=True, tag="get_info"):
    """The answer of get_info."""

    model_id: str
    model_data: ModelData
    model_name: str
    lora_rank: int
    is_lora: bool = True


class WeightsInfo(Struct, frozen=True, kw_only=True):
    """The answer of weights_info."""

    base_model: str
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    is_lora: bool = True


class CheckpointInfo(Struct, frozen=True, kw_only=True):
    """A checkpoint in a list. time, expires_at: ISO 8601."""

    checkpoint_id: str
    checkpoint_type: str
    time: str
    tinker_path: str
    size_bytes: int
    public: bool = False
    user_metadata: Metadata | None = None
    expires_at: str | None = None


class Cursor(Struct, frozen=True, kw_only=True):
    """A page of a list."""

    offset: int
    limit: int
    total_count: int


class CheckpointList(Struct, frozen=True, kw_only=True):
    """The answer of the lists of checkpoints."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class RunInfo(Struct, frozen=True, kw_only=True):
    """One training run: one adapter."""

    training_run_id: str
    base_model: str
    model_owner: str
    lora_rank: int
    last_request_time: str
    last_checkpoint: CheckpointInfo | None = None
    last_sampler_checkpoint: CheckpointInfo | None = None
    user_metadata: Metadata | None = None
    is_lora: bool = True
    corrupted: bool = False


class RunList(Struct, frozen=True, kw_only=True):
    """The answer of GET training_runs."""

    training_runs: list[RunInfo]
    cursor: Cursor


class SessionInfo(Struct, frozen=True, kw_only=True):
    """The answer of GET sessions/{id}."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: Metadata | None = None
    display_name: str | None = None


class SessionList(Struct, frozen=True, kw_only=True):
    """The answer of GET sessions."""

    sessions: list[str]


class Empty(Struct, frozen=True, kw_only=True):
    """An answer that says nothing more than its status."""
