"""What the native routes have in common: `/generate` of vLLM and of SGLang, and TRL's.

Their clients pass on whatever their own callers gave them. So a field that is unknown here is not refused but named in
the answer (`ignored_fields`); one that would make the completion another, and is not supported, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from clotho.serving.openai_choices import WeightsVersions, weights_versions
from clotho.serving.openai_requests import IGNORED, UNSUPPORTED, GenerationFields, refused, without_unsupported
from clotho.serving.sample_requests import Ask
from clotho.serving.services import GatewayServices
from protocols.sampling import Completion, PromptLogprobs
from protocols.step import WeightsReady

F = TypeVar("F", bound=Struct)
MOST_NAMES, LONGEST_NAME = 16, 64

# Field -> the values that ask for nothing; any other would change what is sampled, or how the answer comes.
ALTERING: dict[str, tuple[object, ...]] = {
    **{name: UNSUPPORTED[name] for name in (
        "presence_penalty", "frequency_penalty", "best_of", "echo", "suffix", "min_tokens", "response_format",
        "structured_outputs", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
    )},
    "stream": (False,), "use_beam_search": (False,), "logits_processors": ([],), "multi_modal_data": ({},),
    "lora_request": (), "lora_path": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "guided_decoding": (), "guided_decoding_regex": (), "generation_kwargs": ({},),
    "structured_outputs_regex": (), "min_new_tokens": (0,), "json_schema": (), "regex": (), "ebnf": (),
    "structural_tag": (), "stop_regex": ([], ""), "custom_logit_processor": (), "custom_params": ({},),
    "image_data": ([],), "images": ([],), "audio_data": ([],), "video_data": ([],), "input_embeds": (),
}  # fmt: skip

# Fields of text alone -> the value that is so anyway; another leaves tokens and log-probabilities as they are.
TEXT_ONLY: dict[str, bool] = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "no_stop_trim": False, "detokenize": True,
}  # fmt: skip


class NativeFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The fields of `GenerationFields` in a body that may have others."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What an answer is made of.

    completions: of all prompts, those of one prompt next to one another. weights: those that served when the request
    came in. prompt: the prompt's own log-probabilities, where they were asked for.
    """

    completions: tuple[Completion, ...]
    weights: WeightsReady
    prompt: PromptLogprobs | None


class NativeAsk(Struct, frozen=True, kw_only=True):
    """A checked request and how to dress what comes of it; prompt_logprobs: alternatives per token of the prompt."""

    ask: Ask
    answer: Callable[[Outcome], Struct | list[Struct]]
    prompt_logprobs: int | None = None


class Served(Struct, frozen=True, kw_only=True):
    """What every native answer tells of itself.

    weights_version, system_fingerprint: of the weights that served when the request came in. weights_versions: of each
    completion, those that drew its first and its last token. ignored_fields: of the request, where there were any.
    """

    model: str
    weights_version: int
    system_fingerprint: str
    weights_versions: list[WeightsVersions | None]
    ignored_fields: tuple[str, ...] | UnsetType = UNSET


def decode_known(fields: dict[str, Any], kind: type[F]) -> tuple[F, tuple[str, ...]]:
    """Decode what is known of the fields; return it with the names of the others that say something.

    Raises ApiError(400) that names the field at fault. A top_k of -1 means all, as it does for vLLM and SGLang.
    """
    rest = without_unsupported(fields, ALTERING)
    if rest.get("top_k") == -1:
        rest["top_k"] = 0
    try:
        decoded = msgspec.convert(rest, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise refused(error) from error
    known = {*kind.__struct_fields__, *IGNORED}
    ignored = [name for name, value in rest.items() if name not in known and value not in (None, TEXT_ONLY.get(name))]
    return decoded, tuple(name[:LONGEST_NAME] for name in ignored[:MOST_NAMES])


def served(
    completions: Sequence[Completion], outcome: Outcome, ignored: tuple[str, ...], services: GatewayServices
) -> dict[str, Any]:
    """Return the fields of `Served` for an answer with these completions."""
    return {
        "model": services.settings.model_name,
        "weights_version": outcome.weights.version,
        "system_fingerprint": outcome.weights.fingerprint,
        "weights_versions": [weights_versions(one.versions) for one in completions],
        "ignored_fields": ignored or UNSET,
    }
