"""POST /generate in vLLM's shape, read as its clients read it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from protocols.sampling import Completion
from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

IDS = [5, 9, 33, END, END, 60]


def read(answer: dict[str, Any]) -> list[tuple[list[int], list[float], str]]:
    """Tokens, log-probabilities and reason of each completion: the first key of a position is the sampled token."""
    assert len(answer["logprobs"]) == len(answer["finish_reasons"])
    found = []
    for positions, reason in zip(answer["logprobs"], answer["finish_reasons"], strict=True):
        firsts = [next(iter(position[0].items())) for position in positions]
        found.append(([int(token) for token, _ in firsts], [logprob for _, logprob in firsts], reason))
    return found


async def ask(served: Served, **fields: Any) -> dict[str, Any]:
    """The answer to a request with these fields beside a prompt of tokens."""
    body = {"prompt": {"prompt_token_ids": IDS}, "logprobs": 0, "max_tokens": 12} | fields
    answer = await served.post("/generate", **body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


async def test_a_group_of_sixteen_comes_in_one_answer() -> None:
    """One request to the engine; lists of equal length; reasons that clients know."""
    async with serving() as served:
        answer = await ask(served, n=16, temperature=1.0, stop=["\nUser:"], seed=5)
        assert len(served.engine.asked) == 1
        assert len(served.engine.asked[0].seeds) == 16
        sampled = read(answer)
        assert [tokens for tokens, _, _ in sampled] == answer["token_ids"]
        assert {reason for _, _, reason in sampled} <= {"stop", "length"}
        assert len({tuple(tokens) for tokens, _, _ in sampled}) > 1
        assert len(answer["text"]) == len(answer["stop_reasons"]) == 16
        for tokens, logprobs, reason in sampled:
            assert len(tokens) == len(logprobs)
            assert (reason == "length") == (tokens[-1] != END)


async def test_tokens_of_the_prompt_are_taken_as_they_are() -> None:
    """A doubled end token, no first token: neither repaired nor tokenised anew; a text is tokenised once."""
    async with serving() as served:
        answer = await ask(served)
        assert served.engine.asked[0].prompt == tuple(answer["prompt_token_ids"]) == tuple(IDS)
        assert answer["prompt"] is None
        answer = await ask(served, prompt="one two")
        assert answer["prompt"] == "one two"
        assert tuple(answer["prompt_token_ids"]) == CharacterTokenizer().encode("one two")
        await ask(served, prompt={"prompt_token_ids": [4, 5], "prompt": "is not read"})
        assert served.engine.asked[2].prompt == (4, 5)


async def test_what_ended_a_completion_is_among_its_tokens() -> None:
    """The end token, a stop token and a stop string: in tokens and log-probabilities; not in the text."""
    async with serving() as served:
        for fields, token, reason in (
            ({"logit_bias": {str(END): 100}}, END, END),
            ({"logit_bias": {"7": 100}, "stop_token_ids": [7]}, 7, 7),
            ({"logit_bias": {"33": 100}, "stop": ["A"]}, 33, "A"),
        ):
            answer = await ask(served, **fields)
            ((tokens, logprobs, finish),) = read(answer)
            assert (tokens, len(logprobs), finish) == ([token], 1, "stop")
            assert answer["stop_reasons"] == [reason]
        assert answer["text"] == [""]


async def test_alternatives_follow_the_drawn_token() -> None:
    """`logprobs: k` gives up to k more, best first; null gives no log-probabilities."""
    async with serving() as served:
        answer = await ask(served, logprobs=4, ignore_eos=True)
        for tokens, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
            for token, (position,) in zip(tokens, positions, strict=True):
                assert next(iter(position)) == str(token)
                assert len(position) == 4
                assert list(position.values()) == sorted(position.values(), reverse=True)
        assert (await ask(served, logprobs=None))["logprobs"] is None


async def test_sampling_fields_reach_the_engine() -> None:
    """Flat, by their usual names; top_k of -1 is all; what is left out is the profile's."""
    async with serving() as served:
        fields = {
            "temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.1, "ignore_eos": True,
            "stop": ["Q:"], "stop_token_ids": [3], "max_tokens": 4,
        }  # fmt: skip
        await ask(served, **fields, seed=9)
        sampling = structs.asdict(served.engine.asked[0].sampling)
        assert {name: sampling[name] for name in fields} == fields | {"stop": ("Q:",), "stop_token_ids": (3,)}
        await ask(served, top_k=-1, max_tokens=None, temperature=None)
        sampling = structs.asdict(served.engine.asked[1].sampling)
        assert (sampling["top_k"], sampling["max_tokens"], sampling["temperature"]) == (0, 16, 1.0)


async def test_completions_longer_than_the_context_are_cut_to_it() -> None:
    """As vLLM's own engine does: the completion ends there, with `length`."""
    async with serving() as served:
        answer = await ask(served, max_tokens=10**6, ignore_eos=True)
        assert answer["finish_reasons"] == ["length"]
        assert len(answer["token_ids"][0]) == CONTEXT - len(IDS)


async def test_the_weights_are_named() -> None:
    """Version and fingerprint at the top and in the header, those that drew each completion beside it."""
    async with serving() as served:
        answer = await served.post("/generate", prompt="x", n=2, max_tokens=3)
        body = answer.json()
        assert answer.headers["x-clotho-weights-version"] == "3"
        assert (body["weights_version"], body["system_fingerprint"], body["model"]) == (3, "f3", "policy")
        assert body["weights_versions"] == [{"first": 3, "last": 3}] * 2


async def test_fields_that_are_not_known_are_named_in_the_answer() -> None:
    """Clients pass on what they are given; what asks for nothing is not worth a word."""
    async with serving() as served:
        assert "ignored_fields" not in await ask(served, skip_special_tokens=True, tools=None, user="u", min_tokens=0)
        answer = await ask(served, priority=1, skip_special_tokens=False, **{"x" * 1000: 1})
        assert answer["ignored_fields"] == ["priority", "skip_special_tokens", "x" * 64]
        many = {f"field{number}": 1 for number in range(100)}
        assert len((await ask(served, **many))["ignored_fields"]) == 16


@pytest.mark.parametrize("alternatives", [0, 2])
async def test_the_prompt_is_scored_if_asked_for(alternatives: int) -> None:
    """One entry per token of the prompt, null first; the token itself stands before its alternatives."""
    async with serving() as served:
        answer = await ask(served, prompt_logprobs=alternatives, n=1, temperature=0.0, top_p=1.0, max_tokens=1)
        assert served.scored == [(tuple(IDS), alternatives)]
        first, *others = answer["prompt_logprobs"]
        assert first is None
        assert [next(iter(entry.items())) for entry in others] == [(str(token), -token / 8) for token in IDS[1:]]
        assert [len(entry) for entry in others] == [max(1, alternatives)] * 5
        assert answer["prompt_weights_version"] == 3
        answer = await ask(served)
        assert answer["prompt_logprobs"] is None
        assert "prompt_weights_version" not in answer


async def test_an_aborted_generation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a reason of its own, for which clients have no word."""
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
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "generation_failed"
