"""POST /generate in the formats of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from protocols.sampling import Completion
from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

IDS = [5, 9, 33, END, END, 60]


def read(answer: dict[str, Any]) -> list[tuple[list[int], list[float], str]]:
    """Return tokens, log-probabilities and finish reason of each completion, as atroposlib's client reads them."""
    assert len(answer["logprobs"]) == len(answer["finish_reasons"])
    found = []
    for positions, reason in zip(answer["logprobs"], answer["finish_reasons"], strict=True):
        firsts = [next(iter(position[0].items())) for position in positions]
        found.append(([int(token) for token, _ in firsts], [logprob for _, logprob in firsts], reason))
    return found


async def vllm_generate(served: Served, **fields: Any) -> dict[str, Any]:
    """Return the response to a request with these fields."""
    body = {"prompt": {"prompt_token_ids": IDS}, "logprobs": 0, "max_tokens": 12} | fields
    answer = await served.post("/generate", **body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


async def test_one_request_samples_a_group_of_sixteen() -> None:
    """The engine receives one request; the lists have equal length."""
    async with serving() as served:
        answer = await vllm_generate(served, n=16, temperature=1.0, stop=["\nUser:"], seed=5)
        assert len(served.engine.requests) == 1
        assert len(served.engine.requests[0].seeds) == 16
        sampled = read(answer)
        assert [tokens for tokens, _, _ in sampled] == answer["token_ids"]
        assert {reason for _, _, reason in sampled} <= {"stop", "length"}
        assert len({tuple(tokens) for tokens, _, _ in sampled}) > 1
        assert len(answer["text"]) == len(answer["stop_reasons"]) == 16
        for tokens, logprobs, reason in sampled:
            assert len(tokens) == len(logprobs)
            assert (reason == "length") == (tokens[-1] != END)


async def test_prompt_tokens_are_used_unchanged() -> None:
    """A repeated end token is kept and no first token is added; text is tokenized once."""
    async with serving() as served:
        answer = await vllm_generate(served)
        assert served.engine.requests[0].prompt == tuple(answer["prompt_token_ids"]) == tuple(IDS)
        assert answer["prompt"] is None
        answer = await vllm_generate(served, prompt="one two")
        assert answer["prompt"] == "one two"
        assert tuple(answer["prompt_token_ids"]) == CharacterTokenizer().encode("one two")
        await vllm_generate(served, prompt={"prompt_token_ids": [4, 5], "prompt": "is not read"})
        assert served.engine.requests[2].prompt == (4, 5)


async def test_the_tokens_include_the_stop_token() -> None:
    """The end token, a stop token, and the token of a stop string, which the text does not contain."""
    async with serving() as served:
        for fields, token, reason in (
            ({"logit_bias": {str(END): 100}}, END, END),
            ({"logit_bias": {"7": 100}, "stop_token_ids": [7]}, 7, 7),
            ({"logit_bias": {"33": 100}, "stop": ["A"]}, 33, "A"),
        ):
            answer = await vllm_generate(served, **fields)
            ((tokens, logprobs, finish),) = read(answer)
            assert (tokens, len(logprobs), finish) == ([token], 1, "stop")
            assert answer["stop_reasons"] == [reason]
        assert answer["text"] == [""]


async def test_alternatives_follow_the_sampled_token() -> None:
    """`logprobs: k` returns up to k alternatives, most probable first; null returns no log-probabilities."""
    async with serving() as served:
        answer = await vllm_generate(served, logprobs=4, ignore_eos=True)
        for tokens, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
            for token, (position,) in zip(tokens, positions, strict=True):
                assert next(iter(position)) == str(token)
                assert len(position) == 4
                assert list(position.values()) == sorted(position.values(), reverse=True)
        assert (await vllm_generate(served, logprobs=None))["logprobs"] is None


async def test_sampling_parameters_reach_the_engine() -> None:
    """A top_k of -1 keeps all tokens; absent parameters take the profile's value."""
    async with serving() as served:
        fields = {
            "temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.1, "ignore_eos": True,
            "stop": ["Q:"], "stop_token_ids": [3], "max_tokens": 4,
        }  # fmt: skip
        await vllm_generate(served, **fields, seed=9)
        sampling = structs.asdict(served.engine.requests[0].sampling)
        assert {name: sampling[name] for name in fields} == fields | {"stop": ("Q:",), "stop_token_ids": (3,)}
        await vllm_generate(served, top_k=-1, max_tokens=None, temperature=None)
        sampling = structs.asdict(served.engine.requests[1].sampling)
        assert (sampling["top_k"], sampling["max_tokens"], sampling["temperature"]) == (0, 16, 1.0)


async def test_max_tokens_is_limited_to_the_context() -> None:
    """As in vLLM; the finish reason is `length`."""
    async with serving() as served:
        answer = await vllm_generate(served, max_tokens=10**6, ignore_eos=True)
        assert answer["finish_reasons"] == ["length"]
        assert len(answer["token_ids"][0]) == CONTEXT - len(IDS)


async def test_the_response_contains_the_policy_version() -> None:
    """In the body, in the header, and for each completion."""
    async with serving() as served:
        answer = await served.post("/generate", prompt="x", n=2, max_tokens=3)
        body = answer.json()
        assert answer.headers["x-clotho-weights-version"] == "3"
        assert (body["weights_version"], body["system_fingerprint"], body["model"]) == (3, "f3", "policy")
        assert body["weights_versions"] == [{"first": 3, "last": 3}] * 2


async def test_ignored_fields_are_listed_in_the_response() -> None:
    """Fields without effect are not listed; names and the number of names are limited."""
    async with serving() as served:
        assert "ignored_fields" not in await vllm_generate(
            served, skip_special_tokens=True, tools=None, user="u", min_tokens=0
        )
        answer = await vllm_generate(served, priority=1, no_stop_trim=True, **{"x" * 1000: 1})
        assert answer["ignored_fields"] == ["priority", "no_stop_trim", "x" * 64]
        many = {f"field{number}": 1 for number in range(100)}
        assert len((await vllm_generate(served, **many))["ignored_fields"]) == 16


@pytest.mark.parametrize("alternatives", [0, 2])
async def test_prompt_log_probabilities_are_optional(alternatives: int) -> None:
    """The first entry is null; each entry starts with the prompt token."""
    async with serving() as served:
        answer = await vllm_generate(
            served, prompt_logprobs=alternatives, n=1, temperature=0.0, top_p=1.0, max_tokens=1
        )
        assert served.scored == [(tuple(IDS), alternatives)]
        first, *others = answer["prompt_logprobs"]
        assert first is None
        assert [next(iter(entry.items())) for entry in others] == [(str(token), -token / 8) for token in IDS[1:]]
        assert [len(entry) for entry in others] == [max(1, alternatives)] * 5
        assert answer["prompt_weights_version"] == 3
        answer = await vllm_generate(served)
        assert answer["prompt_logprobs"] is None
        assert "prompt_weights_version" not in answer


async def test_an_aborted_completion_has_its_tokens_and_a_finish_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finish reason is vLLM's and SGLang's."""
    aborted = Completion(tokens=(4,), logprobs=(-1.0,), versions=(3,), text="$", finish_reason="abort")

    async def complete_all(*_: Any) -> list[list[Completion]]:
        return [[aborted]]

    async with serving() as served:
        monkeypatch.setattr(served.sampler, "complete_all", complete_all)
        for route, body in (
            ("/generate", {"prompt": "x", "logprobs": 0}),
            ("/generate", {"text": "x"}),
            ("/v1/generate/", {"prompts": ["x"]}),
        ):
            answer = await served.post(route, **body)
            assert answer.status_code == 200
            assert '"abort"' in answer.text
            assert "[4]" in answer.text


async def sglang_generate(served: Served, params: dict[str, Any], **fields: Any) -> Any:
    """Return the response to a request with these sampling parameters."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 12} | params, "return_logprob": True} | fields
    answer = await served.post("/generate", **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-clotho-weights-version"] == "3"
    return answer.json()


async def test_one_completion_is_an_object_and_several_are_a_list() -> None:
    """A log-probability entry is (logprob, token, text); the text is null unless requested."""
    async with serving() as served:
        one = await sglang_generate(served, {"n": 1, "ignore_eos": True}, return_text_in_logprobs=False)
        assert served.engine.requests[0].prompt == tuple(IDS)
        entries = one["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in entries] == one["output_ids"]
        assert all(logprob < 0 and text is None for logprob, _, text in entries)
        assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        group = await sglang_generate(served, {"n": 16, "stop": ["Q:"], "temperature": 1.0})
        assert len(group) == 16
        assert len(served.engine.requests) == 2
        assert {entry["meta_info"]["finish_reason"]["type"] for entry in group} <= {"stop", "length"}
        assert len({entry["meta_info"]["id"] for entry in group}) == 16


async def test_meta_info_contains_token_counts_and_policy_versions() -> None:
    """SGLang's `weight_version` is a string."""
    async with serving() as served:
        meta = (await sglang_generate(served, {"logit_bias": {str(END): 100}}, rid="mine"))["meta_info"]
        assert meta["finish_reason"] == {"type": "stop", "matched": END}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["id"]) == (6, 1, "mine")
        assert (meta["weight_version"], meta["weights_version"], meta["system_fingerprint"]) == ("3", 3, "f3")
        assert meta["weights_versions"] == [{"first": 3, "last": 3}]
        assert meta["output_token_logprobs"][0][1] == END


async def test_log_probabilities_are_optional() -> None:
    """Texts and alternatives are optional too."""
    async with serving() as served:
        plain = await sglang_generate(served, {}, return_logprob=False, top_logprobs_num=3)
        assert "output_token_logprobs" not in plain["meta_info"]
        meta = (await sglang_generate(served, {"ignore_eos": True}, top_logprobs_num=3, return_text_in_logprobs=True))[
            "meta_info"
        ]
        text = "".join(entry[2] for entry in meta["output_token_logprobs"])
        assert text == CharacterTokenizer().decode([entry[1] for entry in meta["output_token_logprobs"]])
        assert [len(entries) for entries in meta["output_top_logprobs"]] == [3] * 12
        assert meta["output_top_logprobs"][0][0] == meta["output_token_logprobs"][0]


async def test_a_prompt_can_be_text() -> None:
    """`text` instead of `input_ids`, without sampling parameters."""
    async with serving() as served:
        answer = await served.post("/generate", text="hello")
        assert served.engine.requests[0].prompt == CharacterTokenizer().encode("hello")
        assert isinstance(answer.json()["text"], str)


async def test_sampling_parameters_of_sglang_reach_the_engine() -> None:
    """max_new_tokens has precedence over max_completion_tokens and max_tokens, and is limited to the context."""
    async with serving() as served:
        fields = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [4]}
        await sglang_generate(served, {**fields, "top_k": -1, "sampling_seed": 3, "max_new_tokens": 10**6})
        sampling = structs.asdict(served.engine.requests[0].sampling)
        assert {name: sampling[name] for name in fields} == fields | {"stop_token_ids": (4,)}
        assert (sampling["top_k"], sampling["max_tokens"]) == (0, CONTEXT - len(IDS))
        await sglang_generate(served, {"seed": 3, "max_tokens": 5, "max_new_tokens": None})
        assert served.engine.requests[0].seeds == served.engine.requests[1].seeds
        assert served.engine.requests[1].sampling.max_tokens == 5
        await sglang_generate(served, {"max_completion_tokens": 6, "max_tokens": 5, "max_new_tokens": None})
        assert served.engine.requests[2].sampling.max_tokens == 6


async def test_ignored_fields_are_listed_in_meta_info() -> None:
    """Fields of the body and of `sampling_params`."""
    async with serving() as served:
        meta = (await sglang_generate(served, {"stream_interval": 2}, logprob_start_len=0))["meta_info"]
        assert meta["ignored_fields"] == ["logprob_start_len", "sampling_params.stream_interval"]
