"""POST /generate in SGLang's shape, read as its clients read it."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

IDS = [5, 9, 33, END, END, 60]


async def ask(served: Served, params: dict[str, Any], **fields: Any) -> Any:
    """The answer to a request with these sampling parameters."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 12} | params, "return_logprob": True} | fields
    answer = await served.post("/generate", **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-clotho-weights-version"] == "3"
    return answer.json()


async def test_one_completion_is_an_object_and_several_are_a_list() -> None:
    """Log-probability first, token second, and no text unless asked for; the prompt as it was given."""
    async with serving() as served:
        one = await ask(served, {"n": 1, "ignore_eos": True}, return_text_in_logprobs=False)
        assert served.engine.asked[0].prompt == tuple(IDS)
        entries = one["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in entries] == one["output_ids"]
        assert all(logprob < 0 and text is None for logprob, _, text in entries)
        assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        group = await ask(served, {"n": 16, "stop": ["Q:"], "temperature": 1.0})
        assert len(group) == 16
        assert len(served.engine.asked) == 2
        assert {entry["meta_info"]["finish_reason"]["type"] for entry in group} <= {"stop", "length"}
        assert len({entry["meta_info"]["id"] for entry in group}) == 16


async def test_meta_information_counts_tokens_and_names_the_weights() -> None:
    """Its own name for the version is a string."""
    async with serving() as served:
        meta = (await ask(served, {"logit_bias": {str(END): 100}}, rid="mine"))["meta_info"]
        assert meta["finish_reason"] == {"type": "stop", "matched": END}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["id"]) == (6, 1, "mine")
        assert (meta["weight_version"], meta["weights_version"], meta["system_fingerprint"]) == ("3", 3, "f3")
        assert meta["weights_versions"] == [{"first": 3, "last": 3}]
        assert meta["output_token_logprobs"][0][1] == END


async def test_log_probabilities_come_only_if_asked_for() -> None:
    """With text and alternatives, if that is asked for too."""
    async with serving() as served:
        plain = await ask(served, {}, return_logprob=False, top_logprobs_num=3)
        assert "output_token_logprobs" not in plain["meta_info"]
        meta = (await ask(served, {"ignore_eos": True}, top_logprobs_num=3, return_text_in_logprobs=True))["meta_info"]
        text = "".join(entry[2] for entry in meta["output_token_logprobs"])
        assert text == CharacterTokenizer().decode([entry[1] for entry in meta["output_token_logprobs"]])
        assert [len(entries) for entries in meta["output_top_logprobs"]] == [3] * 12
        assert meta["output_top_logprobs"][0][0] == meta["output_token_logprobs"][0]


async def test_a_text_may_stand_for_tokens() -> None:
    """`text` instead of `input_ids`, and no parameters at all."""
    async with serving() as served:
        answer = await served.post("/generate", text="hello")
        assert served.engine.asked[0].prompt == CharacterTokenizer().encode("hello")
        assert isinstance(answer.json()["text"], str)


async def test_sampling_parameters_reach_the_engine() -> None:
    """By SGLang's names; the limit has three, of which its own goes first, and is cut to the context."""
    async with serving() as served:
        fields = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [4]}
        await ask(served, {**fields, "top_k": -1, "sampling_seed": 3, "max_new_tokens": 10**6})
        sampling = structs.asdict(served.engine.asked[0].sampling)
        assert {name: sampling[name] for name in fields} == fields | {"stop_token_ids": (4,)}
        assert (sampling["top_k"], sampling["max_tokens"]) == (0, CONTEXT - len(IDS))
        await ask(served, {"seed": 3, "max_tokens": 5, "max_new_tokens": None})
        assert served.engine.asked[0].seeds == served.engine.asked[1].seeds
        assert served.engine.asked[1].sampling.max_tokens == 5
        await ask(served, {"max_completion_tokens": 6, "max_tokens": 5, "max_new_tokens": None})
        assert served.engine.asked[2].sampling.max_tokens == 6


async def test_fields_that_are_not_known_are_named_in_the_answer() -> None:
    """Of the body, and of its parameters."""
    async with serving() as served:
        meta = (await ask(served, {"stream_interval": 2}, logprob_start_len=0))["meta_info"]
        assert meta["ignored_fields"] == ["logprob_start_len", "sampling_params.stream_interval"]
