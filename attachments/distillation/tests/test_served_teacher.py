"""A teacher behind a server: what is read of its answers, what is repeated, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import clotho
from attachments.distillation import served_teacher
from attachments.distillation.sections import DistillationSection
from attachments.distillation.served_teacher import ServedTeacher
from attachments.distillation.teacher import TeacherError
from attachments.distillation.tests.teachers import Answer, TeacherServer, scored
from protocols.errors import ProfileError
from protocols.sampling import MIN_LOGPROB
from tests.library_policy import policy

KEY = "sk-secret-0123456789"


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    """A server whose model gives every token the log-probability -0.5."""
    made = TeacherServer()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(served_teacher, "LONGEST_PAUSE", 0.001)
    monkeypatch.setenv("TEACHER_KEY", KEY)


def teacher(url: str, **keys: Any) -> ServedTeacher:
    """Return the teacher at a URL."""
    return ServedTeacher(DistillationSection(teacher=url, **keys))


async def test_a_group_is_one_request_of_its_completions_behind_their_prompt(server: TeacherServer) -> None:
    """Choices may come in any order. Nothing but one ignored token is sampled."""
    one = teacher(server.url, api_key_env="TEACHER_KEY", model="large")
    found = await one.score((1, 2), [(3, 4, 5), (6,)])
    ((headers, body),) = server.requests
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body["prompt"] == [[1, 2, 3, 4, 5], [1, 2, 6]]
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("large", 1, 0)
    assert [scores.logprobs for scores in found] == [(-0.5, -0.5, -0.5), (-0.5,)]
    assert [scores.best for scores in found] == [(), ()]


async def test_the_best_tokens_of_each_position_are_sorted_and_cut(server: TeacherServer) -> None:
    """A server may add the token of the prompt to the best tokens."""
    server.answer = lambda body: scored(body | {"prompt_logprobs": 4})
    (found,) = await teacher(f"{server.url}/v1/", loss="forward_kl", top_k=2).score((1, 2), [(3, 9)])
    assert found.best == (((3, -0.5), (4, -1.5)), ((9, -0.5), (10, -1.5)))
    assert found.logprobs == (-0.5, -0.5)


@pytest.mark.parametrize("status", [429, 529])
async def test_a_busy_server_is_asked_again(
    status: int, server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated requests are counted, and the pauses between them are doubled up to a limit."""
    pauses: list[float] = []
    monkeypatch.setattr(served_teacher, "LONGEST_PAUSE", 0.003)
    monkeypatch.setattr("random.uniform", lambda low, high: high)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("anyio.sleep", pause)
    server.answer = lambda body: (status, {}) if len(server.requests) < 5 else scored(body)
    one = teacher(server.url)
    assert len(await one.score((1,), [(2,)])) == 1
    assert one.retries == len(pauses) == 4
    assert pauses == [0.001, 0.002, 0.003, 0.003]


async def test_a_token_that_the_teacher_excludes_has_the_least_log_probability(server: TeacherServer) -> None:
    """JSON has no minus infinity: a server writes null, or a large number."""
    choice = {"index": 0, "prompt_logprobs": [None, {"3": {"logprob": None}}, {"4": {"logprob": -1e30}}]}
    server.answer = lambda body: (200, {"choices": [choice]})
    (found,) = await teacher(server.url).score((1,), [(3, 4)])
    assert found.logprobs == (MIN_LOGPROB, MIN_LOGPROB)


async def test_a_server_of_this_machine_is_asked_without_a_proxy(
    server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment names one for the servers of other machines."""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert len(await teacher(server.url, timeout_seconds=5.0).score((1,), [(2,)])) == 1


async def test_a_server_that_stays_away_ends_in_an_error_within_the_time_limit(server: TeacherServer) -> None:
    """Its message says what happened last, without the API key that a server may repeat."""
    server.answer = lambda body: (500, {"detail": f"bad {KEY}"})
    with pytest.raises(TeacherError) as caught:
        await teacher(server.url, api_key_env="TEACHER_KEY", timeout_seconds=2.0).score((1,), [(2,)])
    assert "status 500" in str(caught.value)
    assert KEY not in str(caught.value)
    server.close()
    with pytest.raises(TeacherError, match="ConnectError"):
        await teacher(server.url, timeout_seconds=2.0).score((1,), [(2,)])


def without_scores(body: dict[str, Any]) -> Answer:
    """Answer as a server that does not know `prompt_logprobs`."""
    return 200, {"choices": [{"index": 0, "text": "x"}]}


def other_tokens(body: dict[str, Any]) -> Answer:
    """Answer with the scores of another prompt."""
    return scored(body | {"prompt": [[1, 2, 7]]})


def too_few(body: dict[str, Any]) -> Answer:
    """Answer with the scores of the tokens alone."""
    return scored(body | {"prompt_logprobs": 1})


def unscored(body: dict[str, Any]) -> Answer:
    """Answer without alternatives for one token."""
    return 200, {"choices": [{"index": 0, "prompt_logprobs": [None, {"2": {"logprob": -0.5}}, None]}]}


@pytest.mark.parametrize(
    "answer",
    [
        without_scores, other_tokens, too_few, unscored,
        lambda body: (200, {"choices": []}), lambda body: (400, {"error": "no"}),
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_used_is_an_error_at_once(answer: Any, server: TeacherServer) -> None:
    """It is not repeated."""
    server.answer = answer
    with pytest.raises(TeacherError):
        await teacher(server.url, loss="forward_kl", top_k=3).score((1, 2), [(3,)])
    assert len(server.requests) == 1


def test_a_server_that_is_down_at_the_start_is_refused(server: TeacherServer) -> None:
    """So is one without log-probabilities of prompts, and a URL with a password."""
    assert teacher(server.url).encode(["ab"]) == [(ord("b"),)]
    server.answer = without_scores
    with pytest.raises(ProfileError, match="prompt_logprobs"):
        teacher(server.url).encode(["ab"])
    server.close()
    with pytest.raises(ProfileError, match="cannot be reached"):
        teacher(server.url).encode(["ab"])
    for secret in ("me:secret", "secret"):
        with pytest.raises(ProfileError, match="password"):
            teacher(f"http://{secret}@localhost:1")
    with pytest.raises(ProfileError, match="NO_SUCH_KEY"):
        teacher("http://localhost:1", api_key_env="NO_SUCH_KEY")


async def test_the_server_of_this_project_is_a_teacher() -> None:
    """Its log-probabilities are those of its model, and it encodes texts as the policy does."""
    prompt, completion = policy().chat("What is 2 + 3?"), policy().tokenizer.encode("<think></think><answer>5</answer>")
    with clotho.Sampler(policy()) as sampler, clotho.serve(sampler, port=0) as server:
        (found,) = await teacher(server.url, loss="forward_kl", top_k=3).score(prompt, [completion])
        (expected,) = sampler.score([prompt], [completion])
        assert found.logprobs == pytest.approx(expected, abs=1e-5)
        assert {len(position) for position in found.best} == {3}
        assert teacher(server.url).encode(["What is 2 + 3?"]) == [policy().tokenizer.encode("What is 2 + 3?")[1:]]
