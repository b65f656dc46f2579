"""Data for the learner, and what it returns, on Tinker's two wires: protobuf, which the SDK uses, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from attachments.tinker.bodies import Call, ModelInput, Strict, TextChunk
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.openai_requests import converted
from protocols.errors import visible
from protocols.sampling import Completion, PromptLogprobs

PROTOBUF, JSON = "application/x-protobuf", "application/json"

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""What fills up lists of the most probable tokens."""

Values = NDArray[Any]
DTYPES: Mapping[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
WIRE_TYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1


class WireRow(Struct, frozen=True, kw_only=True):
    """One sequence. tokens: those that the model reads. inputs: of the loss, by name."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Values]


class ForwardBackward(Struct, frozen=True, kw_only=True):
    """A request for a gradient, or for log-probabilities only."""

    model_id: str
    loss_fn: str
    config: Mapping[str, float | str]
    rows: Sequence[WireRow]
    forward_only: bool


class TensorFields(Strict, frozen=True):
    """A tensor in JSON."""

    data: list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class DatumFields(Struct, frozen=True, kw_only=True):
    """A sequence in JSON."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorFields]


class InputFields(Strict, frozen=True):
    """The data of a request in JSON."""

    data: list[DatumFields]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardFields(Call, frozen=True, kw_only=True):
    """The body of forward_backward in JSON; that of forward has `forward_input`."""

    model_id: str
    forward_backward_input: InputFields | None = None
    forward_input: InputFields | None = None
    forward_only: bool = False


@cache
def _message(name: str) -> Any:
    from attachments.tinker.proto import message_class

    return message_class(name)


def text_tokens(chunks: Sequence[TextChunk]) -> tuple[int, ...]:
    """Return the tokens of an input. Raises ApiError for images and sound."""
    for chunk in chunks:
        if chunk.type != "encoded_text":
            raise invalid_field("chunks", f"chunks of type {visible(chunk.type, 40)!r} are not served; send tokens")
    return tuple(token for chunk in chunks for token in chunk.tokens)


def read_forward_backward(body: bytes, media_type: str, *, forward_only: bool) -> tuple[ForwardBackward, int | None]:
    """Read a request, and its number. forward_only: the route computes no gradient. Raises ApiError."""
    if media_type == PROTOBUF:
        return _from_protobuf(body)
    fields = converted(json_object(body), ForwardBackwardFields, strict=False)
    given = fields.forward_backward_input or fields.forward_input
    if given is None:
        raise invalid_field("forward_backward_input", "is missing")
    call = ForwardBackward(
        model_id=fields.model_id,
        loss_fn=given.loss_fn,
        config=given.loss_fn_config or {},
        rows=[_row(datum) for datum in given.data],
        forward_only=forward_only or fields.forward_only or fields.forward_backward_input is None,
    )
    return call, fields.seq_id


def _row(datum: DatumFields) -> WireRow:
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.sparse_crow_indices is not None or tensor.sparse_col_indices is not None:
            raise _several_targets(name)
        try:
            values = np.array(tensor.data, dtype=DTYPES[tensor.dtype])
            inputs[name] = values if tensor.shape is None else values.reshape(tensor.shape)
        except (ValueError, OverflowError) as error:
            raise invalid_field(visible(name, 60), visible(str(error), 200)) from error
    return WireRow(tokens=text_tokens(datum.model_input.chunks), inputs=inputs)


def _several_targets(name: str) -> ApiError:
    return invalid_field(
        visible(name, 60), "several targets for one position are not served; send one datum for each target"
    )


def _from_protobuf(body: bytes) -> tuple[ForwardBackward, int | None]:
    from google.protobuf.message import DecodeError

    try:
        message = _message("ForwardBackwardRequest").FromString(body)
        texts = {name: value.text for name, value in message.loss_fn_config_v2.items() if value.HasField("text")}
    except (DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "The request body is no ForwardBackwardRequest.") from error
    call = ForwardBackward(
        model_id=message.model_id,
        loss_fn=message.loss_fn,
        config=dict(message.loss_fn_config) | texts,
        rows=[
            WireRow(
                tokens=tuple(token for chunk in datum.model_input for token in _chunk(chunk)),
                inputs={name: _tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
            )
            for datum in message.data
        ],
        forward_only=message.forward_only,
    )
    return call, message.seq_id or None


def _chunk(chunk: Any) -> list[int]:
    if not chunk.HasField("encoded_text"):
        raise invalid_field("model_input", "images and sound are not served; send tokens")
    return [int(token) for token in _numbers("model_input", chunk.encoded_text.tokens, np.dtype("<i4"))]


def _numbers(name: str, content: bytes, dtype: np.dtype[Any]) -> Values:
    if len(content) % dtype.itemsize:
        raise invalid_field(visible(name, 60), f"has {len(content)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(content, dtype=dtype)


def _tensor(name: str, tensor: Any) -> Values:
    if tensor.HasField("sparse_csr"):
        raise _several_targets(name)
    if tensor.dtype not in WIRE_TYPES:
        raise invalid_field(visible(name, 60), "has an unknown type; send float32 or int64")
    values = _numbers(name, tensor.dense, WIRE_TYPES[tensor.dtype])
    try:
        return values.reshape(list(tensor.shape)) if tensor.shape else values
    except (ValueError, OverflowError) as error:
        raise invalid_field(visible(name, 60), visible(str(error), 200)) from error


class GradientResult(Struct, frozen=True, kw_only=True):
    """What forward_backward and forward return. outputs: by name, an array for each row. metrics: NAME:REDUCTION."""

    outputs: Mapping[str, Sequence[NDArray[np.float32]]]
    metrics: Mapping[str, float]

    def json(self) -> object:
        """Return the body in JSON."""
        rows = [
            {
                name: {"data": value_N.tolist(), "dtype": "float32", "shape": [len(value_N)]}
                for name, value_N in zip(self.outputs, values, strict=True)
            }
            for values in zip(*self.outputs.values(), strict=True)
        ]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": rows, "metrics": self.metrics}

    def protobuf(self) -> Any:
        """Return a ForwardBackwardOutput."""
        message = _message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
        for name, value in self.metrics.items():
            message.metrics[name] = value
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord")
        for name, rows in self.outputs.items():
            record.num_datums = len(rows)
            field = record.fields[name]
            field.data = b"".join(row_N.astype("<f4").tobytes() for row_N in rows)
            field.offsets = np.cumsum([0, *(4 * len(row_N) for row_N in rows)], dtype="<i8").tobytes()
            field.dtype = FLOAT32
        return message


class SampleResult(Struct, frozen=True, kw_only=True):
    """What asample returns.

    versions: steps of the optimizer before each token, which protobuf has no field for. prompt: scores of the prompt;
    None if nobody asked. scored: the number of its last tokens that are reported. top: as requested, of the prompt.
    """

    completions: Sequence[Completion]
    versions: Sequence[Sequence[int]]
    prompt_logprobs: Sequence[float] | None = None
    top_prompt_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None

    @classmethod
    def of(
        cls,
        completions: Sequence[Completion],
        versions: Sequence[Sequence[int]],
        prompt: PromptLogprobs | None,
        *,
        last: int | None,
        top: int,
        logprobs: bool,
    ) -> SampleResult:
        """Return a result. last: report so many tokens of the prompt; None: all but the first, which has no score."""
        if prompt is None:
            return cls(completions=completions, versions=versions)
        hidden = 1 if last is None else len(prompt.logprobs) + 1 - last
        scores = [float("nan")] * hidden + list(prompt.logprobs[hidden - 1 :])
        best: list[Sequence[tuple[int, float]]] = [()] * hidden + list(prompt.top_logprobs[hidden - 1 :])
        return cls(
            completions=completions,
            versions=versions,
            prompt_logprobs=scores if logprobs else None,
            top_prompt_logprobs=best if top else None,
        )

    def json(self) -> object:
        """Return the body in JSON."""
        sequences = [
            {
                "stop_reason": one.finish_reason,
                "tokens": one.tokens,
                "logprobs": one.logprobs,
                "topk_logprobs": one.top_logprobs or None,
                "versions": versions,
            }
            for one, versions in zip(self.completions, self.versions, strict=True)
        ]
        return {
            "type": "sample",
            "sequences": sequences,
            "prompt_logprobs": self.prompt_logprobs,
            "topk_prompt_logprobs": self.top_prompt_logprobs,
        }

    def protobuf(self) -> Any:
        """Return a SampleResponse."""
        message = _message("SampleResponse")()
        for one in self.completions:
            sequence = message.sequences.add(stop_reason=int(one.finish_reason == "length"))
            sequence.tokens = np.array(one.tokens, dtype="<i4").tobytes()
            sequence.logprobs = np.array(one.logprobs, dtype="<f4").tobytes()
            if one.top_logprobs:
                _fill(sequence.topk_sampled_logprobs, one.top_logprobs)
        if self.prompt_logprobs is not None:
            message.prompt_logprobs = np.array(self.prompt_logprobs, dtype="<f4").tobytes()
        if self.top_prompt_logprobs is not None:
            _fill(message.topk_prompt_logprobs, self.top_prompt_logprobs)
        return message


def encoded(result: Struct, *, binary: bool) -> tuple[bytes, str]:
    """Return the body of a result, and its media type. binary: the client reads protobuf."""
    if not isinstance(result, GradientResult | SampleResult):
        return msgspec.json.encode(result), JSON
    if not binary:
        return msgspec.json.encode(result.json()), JSON
    content: bytes = result.protobuf().SerializeToString()
    return content, PROTOBUF


def _fill(message: Any, best: Sequence[Sequence[tuple[int, float]]]) -> None:
    width = max(map(len, best), default=0)
    token_N_K = np.full((len(best), width), NO_TOKEN, dtype="<i4")
    logp_N_K = np.full((len(best), width), NO_LOGPROB, dtype="<f4")
    for n, pairs in enumerate(best):
        for k, (token, logprob) in enumerate(pairs):
            token_N_K[n, k], logp_N_K[n, k] = token, logprob
    message.token_ids, message.logprobs = token_N_K.tobytes(), logp_N_K.tobytes()
    message.k, message.length = width, len(best)
