"""Requests that sample, as rows of the decode engine."""

from __future__ import annotations

import secrets

from msgspec import structs

from attachments.tinker.bodies import SampleCall
from attachments.tinker.samplers import Samplers, SamplingSource
from attachments.tinker.wire import SampleResult, text_tokens
from clotho.inference.sampling import validate
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.services import ClientSampler, Recording, ServerContext
from protocols.errors import GenerationError
from protocols.sampling import MAX_TOP_LOGPROBS, SampleRequest, Sampling, completion_seeds

SEED_BITS = 63


def sample_request(call: SampleCall, sampler: SamplingSource, context: ServerContext) -> SampleRequest:
    """Check a request. Raises ApiError that names what is wrong or not served."""
    _refuse_unserved(call)
    prompt = text_tokens(call.prompt.chunks)
    if not prompt:
        raise invalid_field("prompt", "has no tokens")
    if len(prompt) >= context.context_length:
        raise invalid_field("prompt", f"has {len(prompt)} tokens; the context length is {context.context_length}")
    if call.num_samples > context.settings.max_choices:
        limit = context.settings.max_choices
        raise invalid_field("num_samples", f"must be at most {limit}; raise it with --server.max-choices")
    if call.prompt_logprobs_last_n is not None and not 1 <= call.prompt_logprobs_last_n < len(prompt):
        raise invalid_field("prompt_logprobs_last_n", "must be at least 1, and less than the length of the prompt")
    fields = call.sampling_params
    seed = secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed % 2**SEED_BITS
    request = SampleRequest(
        prompt=prompt,
        sampling=_sampling(call, context.sampling.max_tokens, context.context_length - len(prompt)),
        seeds=completion_seeds(seed, call.num_samples),
        reuse_prefix=True,
        weights=sampler.weights,
    )
    validate(
        request, vocabulary=context.vocab_size, context=context.context_length, cache_tokens=context.context_length
    )
    return request


def _refuse_unserved(call: SampleCall) -> None:
    if call.record_stability_info:
        raise invalid_field("record_stability_info", "is not served; train with loss_fn = importance_sampling")
    if call.target_prompt_logprobs is not None:
        raise invalid_field("target_prompt_logprobs", "is not served; ask for topk_prompt_logprobs, or one prompt each")
    if call.prompt_alt_tokens_k:
        raise invalid_field("prompt_alt_tokens_k", "is not served; sample with max_tokens = 1 from each prefix")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(call, name) > MAX_TOP_LOGPROBS:
            raise invalid_field(name, f"must be at most {MAX_TOP_LOGPROBS}")


def _sampling(call: SampleCall, usual: int, room: int) -> Sampling:
    """Return the settings of the engine, which checks their ranges.

    usual: `max_tokens` if the client says nothing. room: tokens until the end of the context.

    `stop`: strings or tokens end a completion as the model's end tokens do; an empty list disables these.
    """
    fields, stop = call.sampling_params, call.sampling_params.stop
    words = [stop] if isinstance(stop, str) else stop or []
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(0, fields.top_k),
        max_tokens=min(room, usual if fields.max_tokens is None else fields.max_tokens),
        stop=tuple(word for word in words if isinstance(word, str)),
        stop_token_ids=tuple(word for word in words if isinstance(word, int)),
        ignore_eos=isinstance(stop, list) and not stop,
        top_logprobs=call.topk_sample_logprobs,
    )


async def sampled(
    call: SampleCall,
    request: SampleRequest,
    sampler: SamplingSource,
    samplers: Samplers,
    context: ServerContext,
    client: Client,
) -> SampleResult:
    """Sample, and score the prompt if requested. Raises RequestError, GenerationError, ApiError and CheckpointError."""
    await samplers.ready(sampler)
    named = structs.replace(client, name=sampler.session.name)
    rows = ClientSampler(context, named, Recording(remember=lambda _, __: None))
    (completions,) = await rows.complete_all([request])
    if any(one.finish_reason == "abort" for one in completions):
        raise GenerationError("the request was aborted")
    scores = None
    if call.prompt_logprobs or call.topk_prompt_logprobs:
        scores = await context.prompt_logprobs(request.prompt, call.topk_prompt_logprobs, sampler.weights)
    return SampleResult.of(
        completions,
        samplers.steps(sampler, completions),
        scores,
        last=call.prompt_logprobs_last_n,
        top=call.topk_prompt_logprobs,
        logprobs=bool(call.prompt_logprobs),
    )


def named_by(call: SampleCall) -> str:
    """Return the sampling session that a request names. Raises ApiError without one."""
    if call.sampling_session_id is None:
        raise ApiError(400, "sampling_session_id is missing; create a sampling session first.", param="base_model")
    return call.sampling_session_id
