"""The two wires of data and of results: JSON, and protobuf, whose messages are read and written as its objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from attachments.tinker.bodies import Answer, ForwardBackward, TextChunk
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.openai_requests import converted
from protocols.errors import visible

PROTOBUF, JSON = "application/x-protobuf", "application/json"

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""What fills up lists of the most probable tokens."""

INT32, INT64, FLOAT32 = "<i4", "<i8", "<f4"
DTYPES = {1: ("float32", FLOAT32), 2: ("int64", INT64), 3: ("int32", INT32)}
"""Types of tensors by their numbers in `proto.ENUMS`, as JSON names them and as bytes."""


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


def read_forward_backward(body: bytes, media_type: str) -> ForwardBackward:
    """Read a request. Raises ApiError."""
    fields = _from_protobuf(body) if media_type == PROTOBUF else json_object(body)
    return converted(fields, ForwardBackward, strict=False)


def _from_protobuf(body: bytes) -> dict[str, Any]:
    from google.protobuf.message import DecodeError

    try:
        message = _message("ForwardBackwardRequest").FromString(body)
        texts = {name: value.text for name, value in message.loss_fn_config_v2.items() if value.HasField("text")}
        data = [
            {
                "model_input": {"chunks": [_chunk(chunk) for chunk in datum.model_input]},
                "loss_fn_inputs": {name: _tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
            }
            for datum in message.data
        ]
        config = dict(message.loss_fn_config) | texts
    except (DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "The request body is no ForwardBackwardRequest.") from error
    given = {"data": data, "loss_fn": message.loss_fn, "loss_fn_config": config}
    named = {name: getattr(message, name) for name in ("model_id", "seq_id", "forward_only") if message.HasField(name)}
    return {**named, "forward_backward_input": given}


def _chunk(chunk: Any) -> dict[str, Any]:
    if not chunk.HasField("encoded_text"):
        return {"type": next((field.name for field, _ in chunk.ListFields()), "none")}
    return {"tokens": _numbers("model_input", chunk.encoded_text.tokens, INT32)}


def _tensor(name: str, tensor: Any) -> dict[str, Any]:
    if tensor.dtype not in DTYPES:
        raise invalid_field(visible(name, 60), "has an unknown type; send float32 or int64")
    dtype, packed = DTYPES[tensor.dtype]
    given = {"data": _numbers(name, tensor.dense, packed), "dtype": dtype, "shape": list(tensor.shape) or None}
    return given | {"sparse_crow_indices": tensor.HasField("sparse_csr") or None}


def _numbers(name: str, content: bytes, dtype: str) -> list[Any]:
    size = np.dtype(dtype).itemsize
    if len(content) % size:
        raise invalid_field(visible(name, 60), f"has {len(content)} bytes, no multiple of {size}")
    return list(np.frombuffer(content, dtype=dtype).tolist())


def _packed(values: Any, dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def encoded(result: Answer, *, binary: bool) -> tuple[bytes, str]:
    """Return the body of a result, and its media type. binary: the client reads protobuf."""
    found = next((key for key in MESSAGES if key in result), None)
    if not binary or found is None:
        return msgspec.json.encode(result, enc_hook=lambda array: array.tolist()), JSON
    name, fields = MESSAGES[found]
    content: bytes = _message(name)(**fields(result)).SerializeToString()
    return content, PROTOBUF


def _gradient(result: Answer) -> Answer:
    """Return a ForwardBackwardOutput: each output is one array of all rows."""
    rows, fields = result["loss_fn_outputs"], {}
    for name in rows[0]:
        arrays = [np.asarray(row[name]["data"], dtype=FLOAT32) for row in rows]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)])
        data = {"data": _packed(np.concatenate(arrays), FLOAT32), "offsets": _packed(offsets, INT64)}
        fields[name] = {**data, "dtype": "DTYPE_FLOAT32"}
    kind = result["loss_fn_output_type"]
    record = {"type_tag": kind, "fields": fields, "num_datums": len(rows)}
    return {"loss_fn_output_type": kind, "loss_fn_outputs": [record], "metrics": result["metrics"]}


def _sample(result: Answer) -> Answer:
    """Return a SampleResponse, which has no field for versions."""
    sequences = [
        {
            "stop_reason": f"STOP_REASON_{one['stop_reason'].upper()}",
            "tokens": _packed(one["tokens"], INT32),
            "logprobs": _packed(one["logprobs"], FLOAT32),
            "topk_sampled_logprobs": _best(one["topk_logprobs"]),
        }
        for one in result["sequences"]
    ]
    scores, best = result["prompt_logprobs"], _best(result["topk_prompt_logprobs"])
    packed = None if scores is None else _packed(scores, FLOAT32)
    return {"sequences": sequences, "topk_prompt_logprobs": best, "prompt_logprobs": packed}


def _best(best: Sequence[Sequence[tuple[int, float]]] | None) -> Answer | None:
    """Return the most probable tokens of each position as TopkLogprobs, filled up to equal length."""
    if best is None:
        return None
    width = max(map(len, best), default=0)
    full = [[*pairs, *((NO_TOKEN, NO_LOGPROB),) * (width - len(pairs))] for pairs in best]
    token_ids, logprobs = ([[pair[i] for pair in pairs] for pairs in full] for i in (0, 1))
    packed = {"token_ids": _packed(token_ids, INT32), "logprobs": _packed(logprobs, FLOAT32)}
    return {**packed, "k": width, "length": len(best)}


MESSAGES: Mapping[str, tuple[str, Callable[[Answer], Answer]]] = {
    "loss_fn_outputs": ("ForwardBackwardOutput", _gradient),
    "sequences": ("SampleResponse", _sample),
}
"""Results with a message: a field that only they have, the name of the message, and its fields."""
