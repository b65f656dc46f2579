"""The two wires of data and of results: JSON, and protobuf, which is read as JSON and written from it."""

from __future__ import annotations

from base64 import b64decode, b64encode
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
DTYPES = {"DTYPE_FLOAT32": ("float32", FLOAT32), "DTYPE_INT64": ("int64", INT64), "DTYPE_INT32": ("int32", INT32)}


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
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError

    try:
        message = _message("ForwardBackwardRequest").FromString(body)
        given: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ApiError(400, "The request body is no ForwardBackwardRequest.") from error
    values = given.pop("loss_fn_config_v2", {})
    texts = {name: value["text"] for name, value in values.items() if "text" in value}
    data = [
        {
            "model_input": {"chunks": [_chunk(chunk) for chunk in datum.get("model_input", ())]},
            "loss_fn_inputs": {name: _tensor(name, one) for name, one in datum.get("loss_fn_inputs", {}).items()},
        }
        for datum in given.pop("data", ())
    ]
    config = given.pop("loss_fn_config", {}) | texts
    given["forward_backward_input"] = {"data": data, "loss_fn": given.pop("loss_fn", ""), "loss_fn_config": config}
    return given


def _chunk(chunk: Mapping[str, Any]) -> dict[str, Any]:
    if "encoded_text" not in chunk:
        return {"type": next(iter(chunk), "none")}
    return {"tokens": _numbers("model_input", chunk["encoded_text"].get("tokens", ""), INT32)}


def _tensor(name: str, tensor: Mapping[str, Any]) -> dict[str, Any]:
    if tensor.get("dtype") not in DTYPES:
        raise invalid_field(visible(name, 60), "has an unknown type; send float32 or int64")
    dtype, packed = DTYPES[tensor["dtype"]]
    given = {"data": _numbers(name, tensor.get("dense", ""), packed), "dtype": dtype, "shape": tensor.get("shape")}
    return given | {"sparse_crow_indices": tensor.get("sparse_csr")}


def _numbers(name: str, text: str, dtype: str) -> list[Any]:
    content, size = b64decode(text), np.dtype(dtype).itemsize
    if len(content) % size:
        raise invalid_field(visible(name, 60), f"has {len(content)} bytes, no multiple of {size}")
    return list(np.frombuffer(content, dtype=dtype).tolist())


def _packed(values: Any, dtype: str) -> str:
    return b64encode(np.asarray(values, dtype=dtype).tobytes()).decode("ascii")


def encoded(result: Answer, *, binary: bool) -> tuple[bytes, str]:
    """Return the body of a result, and its media type. binary: the client reads protobuf."""
    found = next((key for key in MESSAGES if key in result), None)
    if not binary or found is None:
        return msgspec.json.encode(result, enc_hook=lambda array: array.tolist()), JSON
    from google.protobuf.json_format import ParseDict

    name, fields = MESSAGES[found]
    message = ParseDict(fields(result), _message(name)())
    for key, value in result.get("metrics", {}).items():  # JSON has no numbers that are not finite
        message.metrics[key] = value
    content: bytes = message.SerializeToString()
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
    return {"loss_fn_output_type": kind, "loss_fn_outputs": [record]}


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
    scored = {} if scores is None else {"prompt_logprobs": _packed(scores, FLOAT32)}
    return {"sequences": sequences, "topk_prompt_logprobs": best, **scored}


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
