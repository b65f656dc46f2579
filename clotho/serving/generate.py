"""POST /generate: one path for two shapes, told apart by the names of their fields."""

from __future__ import annotations

from clotho.serving.errors import invalid
from clotho.serving.native import NativeAsk
from clotho.serving.openai_requests import json_object
from clotho.serving.routes_sglang import sglang_ask
from clotho.serving.routes_vllm import vllm_ask
from clotho.serving.services import GatewayServices

SGLANG = frozenset({"input_ids", "text", "sampling_params"})


def generate_ask(body: bytes, services: GatewayServices) -> NativeAsk:
    """Read the body as vLLM's (`prompt`) or SGLang's (`input_ids` or `text`, `sampling_params`); raises ApiError."""
    fields = json_object(body)
    given = {name for name, value in fields.items() if value is not None}
    ours = sorted(given & SGLANG)
    if ours and "prompt" in given:
        raise invalid("prompt", f"is a field of vLLM, {ours[0]} one of SGLang: give one or the other")
    if ours:
        return sglang_ask(fields, services)
    if "prompt" not in given:
        raise invalid("prompt", "is missing: give prompt (vLLM), or input_ids or text (SGLang)")
    return vllm_ask(fields, services)
