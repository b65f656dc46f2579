"""Sessions over HTTP, with OpenAI's client: names, receipts, rows, rewards, and how each session ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from attachments.sessions.tests.session_server import FIXED, LIFE, SessionServer, session_server
from protocols.accounting import Balance
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import JSON, serving

RECEIPT = "x-clotho-receipt"
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **FIXED},
    "/v1/completions": {"prompt": "hi", **FIXED},
    "/v1/responses": {"input": "hi", "ignore_eos": True, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], **FIXED},
}

NAMES: list[dict[str, Any]] = [{"session": "h", "user": "u", "label": "l"}, {"user": "u", "label": "l"}, {"label": "l"}]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_of_a_session_has_a_receipt(
    monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """In a header, which of a stream comes before its first event; it can be rewarded when the stream has ended."""
    async with session_server(monkeypatch) as at:
        body, headers = {**ENDPOINTS[path], "stream": stream}, {"x-clotho-session": "one"}
        async with at.served.http.stream("POST", path, json=body, headers=headers) as answer:
            receipt = answer.headers[RECEIPT]
            await answer.aread()
        assert receipt == f"{LIFE}-0-0"
        assert (await at.post(receipts=[receipt], reward=1.0)).json()["rewarded"] == 1


async def test_a_header_names_the_session_before_the_user_and_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label is the text behind the colon of the API key."""
    async with session_server(monkeypatch) as at:
        for names in NAMES:
            assert RECEIPT in (await at.chat("hi", **names)).headers
        for number, name in enumerate(("h", "u", "l")):
            assert (await at.post(session=name, reward=float(number))).status_code == 200
        assert at.sessions.begun == 3


async def test_metadata_names_the_session_as_clients_of_anthropic_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `user_id`, of at most 256 characters; an answer of a session that has ended is refused in their format."""
    async with session_server(monkeypatch) as at:
        for name, status in (("a" * 256, 200), ("a" * 257, 400)):
            body = {**ENDPOINTS["/v1/messages"], "metadata": {"user_id": name}}
            assert (await at.served.post("/v1/messages", **body)).status_code == status
        assert (await at.post(session="a" * 256, reward=1.0)).status_code == 200
        body = {**ENDPOINTS["/v1/messages"], "metadata": {"user_id": "a" * 256}}
        ended = await at.served.post("/v1/messages", **body)
        assert (ended.status_code, ended.headers["x-should-retry"]) == (409, "false")
        assert (ended.json()["type"], ended.json()["error"]["code"]) == ("error", "ended")


async def test_a_request_without_a_name_belongs_to_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered without a receipt, and nothing of it is kept."""
    async with session_server(monkeypatch) as at:
        assert RECEIPT not in (await at.chat("hi")).headers
        assert at.sessions.begun == 0


async def test_a_stream_of_the_client_of_openai_is_part_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt is there before the tokens are read."""
    async with session_server(monkeypatch) as at:
        client = at.served.openai.chat.completions.with_streaming_response
        async with client.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], stream=True, user="streamed", extra_body=FIXED
        ) as answer:
            assert answer.headers[RECEIPT] == f"{LIFE}-0-0"
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in await answer.parse()])
        assert len(text) == 4
        assert (await at.post(session="streamed", reward=1.0)).status_code == 200


@pytest.mark.parametrize("fields", [{"n": 2}, {"extra_headers": {"X-Clotho-Session": "a b"}}, {"user": 5}])
async def test_a_session_has_one_answer_per_request_and_a_plain_name(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Other requests are refused, and begin no session."""
    async with session_server(monkeypatch) as at:
        with pytest.raises(openai.BadRequestError):
            await at.served.openai.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x"}], **{"user": "one", **fields}
            )
        assert at.sessions.begun == 0


async def test_turns_of_a_session_are_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token what the engine was asked last and what it answered; what the client added is context."""
    async with session_server(monkeypatch) as at:
        first = await at.answer("hi", session="one")
        await at.answer("hi", first, "and?", session="one")
        await at.receipt("two")
        for name, reward in (("one", 1.0), ("two", 0.0)):
            assert (await at.post(session=name, reward=reward)).status_code == 200
        (row,), _ = [member.trajectories for member in (await at.group()).members]
        asked, again = at.served.engine.requests[:2]
        assert list(row.tokens[: len(again.prompt)]) == list(again.prompt)
        assert len(row.tokens) == len(again.prompt) + 4
        completion = row.completion(len(asked.prompt), decode=CharacterTokenizer().decode, reward=1.0)
        between = len(again.prompt) - len(asked.prompt) - 4
        assert completion.sampled == (True,) * 4 + (False,) * between + (True,) * 4
        assert all(logprob == 0.0 for logprob in completion.logprobs[4:-4])
        assert at.sessions.counts.forked == 0


async def test_history_with_other_tokens_of_the_same_text_is_sampled_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a client's text may be others than those that were sampled: those that were sampled count."""
    async with session_server(monkeypatch) as at:
        first = await at.answer("hi", session="one")
        answer = await at.chat("HI", first.upper(), "and?", session="one")
        asked, again = at.served.engine.requests[:2]
        written = at.served.engine.tokenizer.encode(f"{first}\nuser: and?\nassistant: ")
        assert again.prompt == (*asked.prompt, *written)
        assert answer.parse().usage.prompt_tokens == len(again.prompt)
        assert at.sessions.counts.forked == 0


@pytest.mark.parametrize(("tildes", "sampled", "forks"), [(460, 5, 0), (464, 1, 0), (465, 100, 1)])
async def test_tokens_of_a_row_leave_room_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, tildes: int, sampled: int, forks: int
) -> None:
    """An answer has at most what they leave of the context; a prompt for which they leave nothing stays as it is."""
    async with session_server(monkeypatch) as at:
        first = await at.answer("~" * tildes + "hi", session="one")
        answer = await at.chat("hi", first, "and?", session="one", max_tokens=100)
        assert answer.parse().usage.completion_tokens == sampled
        assert at.sessions.counts.forked == forks


@pytest.mark.parametrize("change", ["history", "temperature"])
async def test_what_does_not_continue_a_session_is_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A client that rewrites an earlier answer, or samples with another temperature, forks the session."""
    async with session_server(monkeypatch) as at:
        first = await at.answer("hi", session="one")
        written = "rewritten" if change == "history" else first
        await at.answer("hi", written, "and?", session="one", temperature=0.5 if change == "temperature" else 1.0)
        await at.post(session="one", reward=1.0, group="g", close=True)
        (member,) = (await at.group()).members
        assert [len(one.answers) for one in member.trajectories] == [1, 1]
        assert at.sessions.counts.forked == 1


async def test_rewards_of_answers_leave_the_rest_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is a member of its own, up to its last token; a later reward of the session is for the others."""
    async with session_server(monkeypatch) as at:
        first = await at.answer("hi", session="one")
        second = await at.answer("hi", first, "and?", session="one")
        await at.answer("hi", first, "and?", second, "so?", session="one")
        answer = await at.post(receipts=[f"{LIFE}-0-0", f"{LIFE}-0-2"], rewards=[1.0, 0.5])
        assert answer.json() == {"rewarded": 2, "group": None, "members": 2, "group_size": 2, "complete": True}
        early, late = (await at.group()).members
        assert (early.reward, late.reward) == (1.0, 0.5)
        assert len(early.trajectories[0].tokens) < len(late.trajectories[0].tokens)
        await at.post(session="one", reward=0.25, group="rest", close=True)
        (rest,) = (await at.group()).members
        assert [one.start for one in rest.trajectories[0].answers] == [len(at.served.engine.requests[1].prompt)]


async def test_a_reward_hours_later_is_accepted_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And refused behind it."""
    async with session_server(monkeypatch, reward_seconds=3600.0 * 8) as at:
        await at.receipt("early")
        at.now += 3600.0 * 7
        await at.receipt("later")
        at.now += 3600.0 * 0.9
        assert (await at.post(session="early", reward=1.0)).status_code == 200
        at.now += 3600.0 * 8
        assert await at.refusal(session="later", reward=1.0) == (410, "late")


async def test_refused_posts_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a status and a reason, which is counted; nothing of the post is accepted."""
    async with session_server(monkeypatch) as at:
        await at.receipt("done")
        await at.post(session="done", reward=1.0, group="full")
        await at.receipt("greedy", temperature=0.0)
        left = await at.receipt("open")
        refused = [
            ({"session": "nobody", "reward": 1.0}, (404, "unknown")),
            ({"receipts": ["receipt"], "reward": 1.0}, (404, "unknown")),
            ({"receipts": [f"{LIFE}-9-0"], "reward": 1.0}, (404, "unknown")),
            ({"receipts": [f"{LIFE}-2-7"], "reward": 1.0}, (404, "unknown")),
            ({"receipts": ["ffff-0-0"], "reward": 1.0}, (410, "restarted")),
            ({"session": "done", "reward": 1.0}, (409, "double")),
            ({"receipts": [f"{LIFE}-0-0"], "reward": 1.0}, (409, "double")),
            ({"receipts": [left, left], "reward": 1.0}, (409, "double")),
            ({"receipts": [left, f"{LIFE}-0-0"], "rewards": [1.0, 1.0]}, (409, "double")),
            ({"session": "greedy", "reward": 1.0}, (409, "untrainable")),
            ({"group": "empty", "close": True}, (409, "group")),
        ]
        for body, expected in refused:
            assert await at.refusal(**body) == expected, body
        assert (await at.post(session="open", reward=0.0, group="full")).json()["complete"]
        await at.receipt("third")
        assert await at.refusal(session="third", reward=1.0, group="full") == (409, "group")
        with pytest.raises(openai.ConflictError, match="has ended"):
            await at.receipt("done")
        assert at.sessions.counts.refused["ended"] == 1
        assert at.sessions.counts.rewarded == 2


async def test_the_client_of_openai_does_not_repeat_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, it repeats requests with status 409 twice."""
    async with session_server(monkeypatch) as at:
        await at.receipt("one")
        client, body = at.served.openai.with_options(max_retries=2), {"session": "one", "reward": 1.0}
        await client.post("/rewards", cast_to=object, body=body)
        with pytest.raises(openai.ConflictError):
            await client.post("/rewards", cast_to=object, body=body)
        assert at.sessions.counts.refused == {"double": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reward": 1.0}, "session"), ({"session": "a"}, "reward"),
        ({"session": "a", "receipts": ["b"], "reward": 1.0}, "receipts"),
        ({"session": "a", "rewards": [1.0]}, "rewards"), ({"receipts": ["a", "b"], "rewards": [1.0]}, "rewards"),
        ({"receipts": ["a"], "reward": 1.0, "rewards": [1.0]}, "rewards"), ({"session": "a", "reward": 1e10}, "reward"),
        ({"session": "a", "reward": 1.0, "close": True}, "close"), ({"session": "a", "reward": "1"}, "reward"),
        ({"session": "a", "reward": 1.0, "scenario": "x y"}, "scenario"),
        ({"session": "a", "reward": 1.0, "other": 1}, "other"),
    ],
)  # fmt: skip
async def test_a_malformed_post_names_its_field(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str
) -> None:
    """With status 400; it is not counted as a refused reward."""
    async with session_server(monkeypatch) as at:
        answer = await at.post(**body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert at.sessions.counts.refused.total() == 0


async def test_sessions_belong_to_their_api_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others can neither continue nor reward them; administrators can."""
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    names = ("alice", "bob", "root")
    keys.write_text(
        "".join(f'[{one}]\nkey = "key-of-{one}-0"\nadmin = {str(one == "root").lower()}\n' for one in names)
    )
    async with session_server(monkeypatch, server={"api_keys_file": str(keys)}) as at:
        clients = {
            one: httpx.AsyncClient(
                base_url=at.served.url, headers={**JSON, "authorization": f"Bearer key-of-{one}-0"}, verify=False
            )
            for one in names
        }
        body, session = {**ENDPOINTS["/v1/completions"], "user": "one"}, {"session": "one", "reward": 1.0}
        receipt = (await clients["alice"].post("/v1/completions", json=body)).headers[RECEIPT]
        for path, refused in (
            ("/v1/completions", body),
            ("/v1/rewards", session),
            ("/v1/rewards", {"receipts": [receipt], "reward": 1.0}),
        ):
            answer = await clients["bob"].post(path, json=refused)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign")
        assert at.sessions.counts.refused == {"foreign": 3}
        assert (await clients["root"].post("/v1/rewards", json=session)).status_code == 200
        for client in clients.values():
            await client.aclose()


@pytest.mark.parametrize("limit", [{"max_open": 2}, {"max_kept_mib": 1}])
async def test_the_session_that_was_idle_longest_gives_way(
    monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any]
) -> None:
    """If there are more sessions, or more bytes of their tokens, than a limit permits."""
    monkeypatch.setattr("attachments.sessions.rows.TOKEN_BYTES", 2**20 // 50)
    async with session_server(monkeypatch, **limit) as at:
        for name in ("one", "two", "one", "three"):
            await at.receipt(name)
        assert await at.refusal(session="two", reward=1.0) == (410, "late")
        assert at.sessions.balance().by_reason == {"evicted": at.sessions.begun - at.sessions.open}


async def test_an_answer_that_is_too_long_is_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a receipt, and its reward is refused."""
    async with session_server(monkeypatch, max_tokens=8) as at:
        assert await at.refusal(receipts=[await at.receipt("one")], reward=1.0) == (409, "untrainable")
        assert at.sessions.counts.untrainable == 1


async def test_every_session_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained if one of its answers was, and else dropped for the reason of its last one."""
    async with session_server(monkeypatch, reward_seconds=10.0) as at:
        receipts = [await at.receipt("one") for _ in range(2)]
        for name in ("two", "three", "four", "five"):
            await at.receipt(name)
        await at.receipt("greedy", temperature=0.0)
        await at.post(receipts=receipts, reward=1.0)
        for name in ("two", "three"):
            await at.post(session=name, reward=1.0)
        await at.post(session="four", reward=1.0)
        assert at.sessions.balance().carried_over == 6
        for member, reason in zip((await at.group()).members, ("stale", ""), strict=True):
            member.ended(reason)
        for member in (await at.group()).members:
            member.ended("zero_variance")
        at.now += 11.0
        assert at.sessions.open == 0
        balance = at.sessions.balance()
        assert balance.holds
        assert (balance.prompted, balance.trained, balance.carried_over) == (6, 1, 0)
        assert balance.by_reason == {"zero_variance": 2, "incomplete": 1, "unrewarded": 1, "untrainable": 1}


async def test_sessions_that_a_restart_has_cut_are_lost() -> None:
    """A resumed run counts them once, with those that ended before the checkpoint."""
    saved = Balance(prompted=10, trained=4, by_reason={"stale": 1}, carried_over=5)
    balance = SessionServer(saved=saved).sessions.balance()
    assert balance.holds
    assert (balance.by_reason, balance.carried_over) == ({"stale": 1, "lost": 5}, 0)
    assert SessionServer(saved=balance).sessions.balance() == balance


async def test_the_route_belongs_to_servers_with_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not have it, and do not describe it."""
    async with session_server(monkeypatch) as at:
        described = (await at.served.http.get("/openapi.json")).json()["paths"]
        assert described["/v1/rewards"].keys() == {"post"}
    monkeypatch.undo()
    async with serving() as served:
        assert (await served.post("/v1/rewards", session="a", reward=1.0)).status_code == 404


async def test_feedback_is_an_event_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sessions that it is about."""
    async with session_server(monkeypatch) as at:
        await at.receipt("one")
        with capture_logs() as events:
            await at.post(session="one", reward=0.0, feedback="too short")
        assert {"event": "session_feedback", "sessions": ["one"], "text": "too short"}.items() <= events[-1].items()
