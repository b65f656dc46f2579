"""The judge model, behind a real HTTP server that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from attachments.graders import judge
from attachments.graders.judge import JudgeError
from clotho.rewards.registry import RewardFunction, RewardOptions, load_reward
from protocols.errors import ProfileError
from protocols.prompt import Problem
from protocols.rollout import Discarded
from tests.rewards.groups import group, problem
from training_run.profile.data import RewardSection
from training_run.rewards.runner import RewardRunner

KEY = "sk-secret-0123456789"

LOADED: list[judge.Judge] = []
"""Judges that a test has loaded."""

Answer = tuple[int, dict[str, str], str]
"""Status, headers and body of a response."""


def reply(content: str | None) -> Answer:
    """A chat completion with this text."""
    body = {"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}
    return 200, {}, json.dumps(body)


class JudgeServer:
    """An OpenAI-compatible server. answer: the response to the body of a request. requests: what it received."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: reply("Score: 10")
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.running, self.most_running = 0, 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server._lock:
                    server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                    server.running += 1
                    server.most_running = max(server.most_running, server.running)
                status, headers, text = server.answer(body)
                with server._lock:
                    server.running -= 1
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(text.encode()))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        """End the server."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    """A server whose replies are `Score: 10`. Connections of a judge otherwise live as long as its process."""
    made = JudgeServer()
    yield made
    while LOADED:
        await LOADED.pop()._client.aclose()
    made.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE", 0.001)
    monkeypatch.setenv("JUDGE_KEY", KEY)


def load(server: JudgeServer, *, timeout_seconds: float = 30.0, **settings: Any) -> RewardFunction:
    """Load a judge of the server."""
    options = RewardOptions(
        settings={"url": server.url, "model": "m", "api_key_env": "JUDGE_KEY", **settings},
        timeout_seconds=timeout_seconds,
    )
    function = load_reward("judge", options)
    assert isinstance(function, judge.Judge)
    LOADED.append(function)
    return function


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is right.\nScore: 10", 1.0), ("Score: 7", 0.7), ("**Score:** 7/10", 0.7),
        ("**Score**: **7**", 0.7), ("Score (0-10): 7", 0.7), ("The score is 7.5.", 0.75),
        ("A first score of 3 is too low.\n\nFinal score: 7", 0.7), ("<think>Perhaps Score: 2?</think>\nScore: 7", 0.7),
        ("7", 0.7), (" 0\n", 0.0),
    ],
)  # fmt: skip
async def test_the_score_of_a_reply_is_read(server: JudgeServer, text: str, value: float) -> None:
    """The last one, as models write it; a reply may also be the number alone."""
    server.answer = lambda body: reply(text)
    assert await load(server)(problem(), "42") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("The answer is right.", "no score"), ("", "no score"), (None, "no score"), ("<think>Score: 2", "no score"),
        ("Score: 11", "not between 0 and 10"), ("Score: -3", "not between 0 and 10"),
    ],
)  # fmt: skip
async def test_a_reply_without_a_score_is_an_error(server: JudgeServer, text: str | None, message: str) -> None:
    """It is not guessed; the group is discarded."""
    server.answer = lambda body: reply(text)
    with pytest.raises(JudgeError, match=message):
        await load(server)(problem(), "42")
    assert len(server.requests) == 1


async def test_the_request_has_the_template_the_model_and_the_key(server: JudgeServer) -> None:
    """Columns of the dataset are placeholders. Braces in a completion are not."""
    template = "{prompt} {answer} {completion} {rubric} {scale}"
    function = load(server, template=template, scale=5, body={"max_tokens": 16, "temperature": 0.2})
    asked = Problem(prompt="1+1?", answer="2", type="t", extra={"rubric": ["clear", "short"]})
    server.answer = lambda body: reply("Score: 4")
    assert await function(asked, "{answer} {x}") == 0.8
    path, headers, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "m",
        "max_tokens": 16,
        "temperature": 0.2,
        "messages": [{"role": "user", "content": '1+1? 2 {answer} {x} ["clear","short"] 5'}],
    }


async def test_a_missing_column_is_an_error(server: JudgeServer) -> None:
    """The message names the placeholder."""
    with pytest.raises(JudgeError, match=r"\{rubric\}"):
        await load(server, template="{completion} {rubric}")(problem(), "42")


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        ((429, {"retry-after": "0.01"}, "slow down"), True),
        ((503, {}, "loading"), False),
        ((500, {}, ""), False),
        ((429, {"retry-after": "x"}, ""), False),
    ],
)
async def test_a_request_that_fails_is_repeated(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, failure: Answer, named: bool
) -> None:
    """After a pause, which is longer the second time, or after the time that the server names."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    server.answer = lambda body: failure if len(server.requests) < 3 else reply("Score: 5")
    assert await load(server)(problem(), "42") == 0.5
    assert len(server.requests) == 3
    first, second = pauses
    assert (first == second == 0.01) if named else (0.0005 <= first <= 0.001 <= second <= 0.002)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, "no key"), "status 401"),
        ((404, {}, "no model"), "status 404"),
        ((200, {}, "<html>"), "no chat completion"),
        ((200, {}, '{"choices": []}'), "no chat completion"),
    ],
)
async def test_a_request_that_is_refused_is_not_repeated(server: JudgeServer, answer: Answer, message: str) -> None:
    """Another attempt would end in the same way."""
    server.answer = lambda body: answer
    with pytest.raises(JudgeError, match=message):
        await load(server)(problem(), "42")
    assert len(server.requests) == 1


async def test_a_judge_that_cannot_be_reached_is_an_error_within_the_time_limit(server: JudgeServer) -> None:
    """The message names the address and the last failure."""
    server.close()
    with pytest.raises(JudgeError, match=rf"no reply from {server.url}.*ConnectError"):
        await load(server, timeout_seconds=0.2)(problem(), "42")


async def test_concurrent_requests_are_bounded(server: JudgeServer) -> None:
    """Further completions wait for a free place."""
    full = threading.Barrier(3)

    def answer(body: dict[str, Any]) -> Answer:
        full.wait(10)
        return reply("Score: 10")

    server.answer = answer
    function = load(server, concurrency=3)
    async with anyio.create_task_group() as tasks:
        for number in range(9):
            tasks.start_soon(function, problem(), str(number))
    assert (server.most_running, len(server.requests)) == (3, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "m"}, "url"),
        ({"url": "http://x/v1"}, "model"),
        ({"url": "x/v1", "model": "m"}, "url"),
        ({"url": "http://user:word@x/v1", "model": "m"}, "api_key_env"),
        ({"url": "http://x/v1", "model": "m", "api_key": KEY}, "'api_key'.*did you mean api_key_env"),
        ({"url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"url": "http://x/v1", "model": "m", "pattern": "("}, "pattern"),
        ({"url": "http://x/v1", "model": "m", "pattern": "score"}, "pattern"),
        ({"url": "http://x/v1", "model": "m", "scale": 0}, "scale"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    """Before training. The message never contains a key."""
    with pytest.raises(ProfileError, match=message) as caught:
        load_reward("judge", RewardOptions(settings=settings))
    assert KEY not in str(caught.value)
    assert "word" not in str(caught.value).replace("password", "")


async def test_a_failing_judge_discards_its_group_and_never_shows_the_key(server: JudgeServer) -> None:
    """Not in the reason, not in the event log, even if the server repeats the key in its error message."""
    server.answer = lambda body: (401, {}, f"Incorrect API key provided: {KEY}")
    settings = {"url": server.url, "model": "m", "api_key_env": "JUDGE_KEY"}
    rewards = RewardRunner((RewardSection(name="judge", settings=settings),))
    with capture_logs() as events:
        try:
            await rewards.start()
            outcome = await rewards.score(group("a", "b"))
        finally:
            rewards.close()
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "reward_error"
    assert "status 401: Incorrect API key provided: ***" in outcome.detail
    assert [event["event"] for event in events] == ["reward_failed"]
    assert KEY not in str(events)
