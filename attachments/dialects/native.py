"""Common parts of the native endpoints: /generate of vLLM and SGLang, and /v1/generate of TRL.

Clients of these endpoints pass on fields from their own callers. An unknown field is therefore not rejected; the
response lists it in `ignored_fields`. An unsupported field that would change the completion causes a 400 error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import UNSET, Struct, UnsetType

from clotho.serving.chat_extension import ValidatedRequest
from clotho.serving.openai_fields import IGNORED, UNSUPPORTED, GenerationFields
from clotho.serving.openai_requests import converted, is_same, without_unsupported
from clotho.serving.openai_responses import WeightsVersions, weights_versions
from protocols.sampling import Completion, PromptLogprobs
from protocols.step import WeightsReady

F = TypeVar("F", bound=Struct)
MAX_IGNORED_FIELDS, MAX_FIELD_NAME = 16, 64

# Unsupported field -> the accepted values. Any other value would change the completion or the response format.
UNSUPPORTED_NATIVE: dict[str, tuple[object, ...]] = {
    **{name: UNSUPPORTED[name] for name in (
        "best_of", "suffix",
    )},
    "echo": (False,), "truncate_prompt_tokens": (),
    "stream": (False,), "use_beam_search": (False,), "logits_processors": ([],), "multi_modal_data": ({},),
    "lora_request": (), "lora_path": (), "guided_decoding": (), "generation_kwargs": ({},), "structural_tag": (),
    "stop_regex": ([], ""), "custom_logit_processor": (), "custom_params": ({},),
    "image_data": ([],), "images": ([],), "audio_data": ([],), "video_data": ([],), "input_embeds": (),
}  # fmt: skip

# Field that affects only the text -> its effective value. Other values are ignored.
TEXT_ONLY: dict[str, bool] = {
    "spaces_between_special_tokens": True,
    "no_stop_trim": False, "detokenize": True,
}  # fmt: skip


class NativeFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`GenerationFields` of a request body that may contain unknown fields."""


class GenerationResult(Struct, frozen=True, kw_only=True):
    """The result of a request.

    model: id of the model. completions: of all prompts, ordered by prompt. weights: policy version when the request
    arrived. prompt: log-probabilities of the prompt, if requested.
    """

    model: str
    completions: tuple[Completion, ...]
    weights: WeightsReady
    prompt: PromptLogprobs | None


class NativeRequest(Struct, frozen=True, kw_only=True):
    """A validated request and the function that builds its response body.

    prompt_logprobs: alternatives to return per prompt token; None: do not score the prompt.
    """

    request: ValidatedRequest
    respond: Callable[[GenerationResult], Struct | list[Struct]]
    prompt_logprobs: int | None = None


class ServedBy(Struct, frozen=True, kw_only=True):
    """Fields that every native response contains.

    weights_version, system_fingerprint: of the policy when the request arrived. weights_versions: per completion, the
    policy versions that sampled its first and its last token. ignored_fields: fields of the request without effect.
    """

    model: str
    weights_version: int
    system_fingerprint: str
    weights_versions: list[WeightsVersions | None]
    ignored_fields: tuple[str, ...] | UnsetType = UNSET


def decode_known(fields: dict[str, Any], kind: type[F]) -> tuple[F, tuple[str, ...]]:
    """Decode the known fields; return them with the names of the ignored fields.

    Raises ApiError with status 400 that names the invalid field. A top_k of -1 keeps all tokens, as in vLLM and SGLang.
    """
    rest = without_unsupported(fields, UNSUPPORTED_NATIVE)
    if is_same(rest.get("top_k"), -1):
        rest["top_k"] = 0
    decoded = converted(rest, kind)
    known = {*kind.__struct_fields__, *IGNORED}
    ignored = [
        name
        for name, value in rest.items()
        if name not in known and value is not None and not is_same(value, TEXT_ONLY.get(name))
    ]
    return decoded, tuple(name[:MAX_FIELD_NAME] for name in ignored[:MAX_IGNORED_FIELDS])


def served_by(completions: Sequence[Completion], result: GenerationResult, ignored: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of `ServedBy` for a response with these completions."""
    return {
        "model": result.model,
        "weights_version": result.weights.version,
        "system_fingerprint": result.weights.fingerprint,
        "weights_versions": [weights_versions(completion.versions) for completion in completions],
        "ignored_fields": ignored or UNSET,
    }
