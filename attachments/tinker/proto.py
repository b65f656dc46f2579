"""The protobuf messages of Tinker's wire, described with `protobuf` itself.

Names, numbers and types are those of `tinker/proto/tinker_public_pb2.pyi` in SDK 0.38.0; SDK 0.34.0 has the same
messages with fewer fields. A pool of their own lets SDK and server share a process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "tinker_public"

ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}

MESSAGES = {
    "SampleResponse": (
        "1 sequences *SampledSequence", "2 prompt_logprobs bytes", "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
    ),
    "SampledSequence": (
        "1 stop_reason StopReason", "2 tokens bytes", "3 logprobs bytes", "4 topk_sampled_logprobs TopkLogprobs",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense bytes", "2 sparse_csr SparseCsr", "3 dtype DType", "4 shape *int64"),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype DType", "4 trailing_shape *int64"),
    "ArrayRecord": ("1 type_tag string", "2 fields {BatchedTensor", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string", "2 loss_fn_outputs *ArrayRecord", "3 metrics {double",
    ),
    "ForwardBackwardRequest": (
        "1 model_id string", "2 seq_id int32", "3 data *Datum", "4 loss_fn string", "5 loss_fn_config {double",
        "6 forward_only bool", "7 loss_fn_config_v2 {LossConfigValue",
    ),
    "LossConfigValue": ("1 number double", "2 text string"),
    "Datum": ("1 model_input *Chunk", "2 loss_fn_inputs {Tensor"),
    "Chunk": ("1 encoded_text EncodedTextChunk", "2 image bytes", "3 dmel bytes"),
    "EncodedTextChunk": ("1 tokens bytes",),
}  # fmt: skip
"""Number, name and type of each field; `*`: repeated, `{`: a map from strings.

The messages of images are read as bytes, which have the same form on the wire. All fields have presence (`proto2`).
"""


def _type(kind: str) -> dict[str, str]:
    if kind in MESSAGES or kind in ENUMS or kind.startswith("."):
        return {"type_name": kind if kind.startswith(".") else f".{PACKAGE}.{kind}"}
    return {"type": f"TYPE_{kind.upper()}"}


def _field(name: str, number: int, kind: str) -> dict[str, Any]:
    label = "LABEL_REPEATED" if kind.startswith("*") else "LABEL_OPTIONAL"
    return {"name": name, "number": number, "label": label, **_type(kind.removeprefix("*"))}


def _message(message: str, lines: tuple[str, ...]) -> dict[str, Any]:
    """Describe a message. A map is a list of entries, whose message belongs to this one."""
    fields, entries = [], []
    for number, name, kind in (line.split() for line in lines):
        if kind.startswith("{"):
            entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            pair = [_field("key", 1, "string"), _field("value", 2, kind[1:])]
            entries.append({"name": entry, "field": pair, "options": {"map_entry": True}})
            kind = f"*.{PACKAGE}.{message}.{entry}"
        fields.append(_field(name, int(number), kind))
    return {"name": message, "field": fields, "nested_type": entries}


def _pool() -> DescriptorPool:
    enums = [
        {"name": name, "value": [{"name": value, "number": number} for number, value in enumerate(values)]}
        for name, values in ENUMS.items()
    ]
    messages = [_message(name, lines) for name, lines in MESSAGES.items()]
    file: dict[str, Any] = {"name": f"{PACKAGE}.proto", "package": PACKAGE, "syntax": "proto2"}
    pool = DescriptorPool()
    pool.Add(FileDescriptorProto(**file, enum_type=enums, message_type=messages))
    return pool


_POOL = _pool()


def message_class(name: str) -> Any:
    """Return the class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
