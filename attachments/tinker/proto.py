"""The protobuf messages of Tinker's wire, described with `protobuf` itself.

Names, numbers and types are those of `tinker/proto/tinker_public_pb2.pyi` in SDK 0.38.0; SDK 0.34.0 has the same
messages with fewer fields. A pool of their own lets SDK and server share a process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "tinker_public"

ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}

MESSAGES = {
    "SampleResponse": (
        "1 sequences *SampledSequence", "2 prompt_logprobs ?bytes", "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
    ),
    "SampledSequence": (
        "1 stop_reason StopReason", "2 tokens bytes", "3 logprobs ?bytes", "4 topk_sampled_logprobs TopkLogprobs",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense ?bytes", "2 sparse_csr SparseCsr", "3 dtype DType", "4 shape *int64"),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype DType", "4 trailing_shape *int64"),
    "ArrayRecord": ("1 type_tag string", "2 fields {BatchedTensor", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string", "2 loss_fn_outputs *ArrayRecord", "3 metrics {double",
    ),
    "ForwardBackwardRequest": (
        "1 model_id string", "2 seq_id int32", "3 data *Datum", "4 loss_fn string", "5 loss_fn_config {double",
        "6 forward_only bool", "7 loss_fn_config_v2 {LossConfigValue",
    ),
    "LossConfigValue": ("1 number ?double", "2 text ?string"),
    "Datum": ("1 model_input *Chunk", "2 loss_fn_inputs {Tensor"),
    "Chunk": ("1 encoded_text EncodedTextChunk", "2 image ?bytes", "3 dmel ?bytes"),
    "EncodedTextChunk": ("1 tokens bytes",),
}  # fmt: skip
"""Number, name and type of each field; `*`: repeated, `?`: with presence, `{`: a map from strings.

The messages of images are read as bytes, which have the same form on the wire.
"""

SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "int64", "int32", "uint32", "bool", "string", "bytes")
}


def _typed(field: FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_ENUM if kind in ENUMS else FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


def _entry(message: DescriptorProto, name: str, kind: str) -> str:
    """Add the message of the entries of a map, and return its name."""
    entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
    entry.options.map_entry = True
    optional = FieldDescriptorProto.LABEL_OPTIONAL
    entry.field.add(name="key", number=1, label=optional, type=SCALARS["string"])
    _typed(entry.field.add(name="value", number=2, label=optional), kind)
    return f".{PACKAGE}.{message.name}.{entry.name}"


def _field(message: DescriptorProto, text: str) -> None:
    number, name, kind = text.split()
    many = kind[0] in "*{"
    label = FieldDescriptorProto.LABEL_REPEATED if many else FieldDescriptorProto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    if kind[0] == "{":
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, _entry(message, name, kind[1:])
        return
    _typed(field, kind.lstrip("*?"))
    if kind[0] == "?":
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _pool() -> DescriptorPool:
    file = FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            _field(message, text)
    pool = DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def message_class(name: str) -> Any:
    """Return the class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
