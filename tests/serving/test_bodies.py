"""Request bodies: media type, order of arrival, memory and rate, and strict decoding of JSON objects."""

from __future__ import annotations

import threading

import anyio
import pytest
from anyio.abc import SocketStream
from starlette.datastructures import Headers
from starlette.types import Message

from clotho.serving import bodies, limits
from clotho.serving.bodies import MAX_ELEMENTS, ByteRate, RequestBodies, json_object, require_json
from clotho.serving.errors import ApiError
from tests.serving.raw_connections import connect, head, read_all
from tests.serving.running_server import Served, serving

TEXT = "/v1/completions"
JSON_ROUTES = (TEXT, "/v1/chat/completions", "/generate", "/v1/generate", "/v1/generate/")


@pytest.mark.parametrize("route", JSON_ROUTES)
async def test_another_media_type_is_refused(route: str) -> None:
    """Status 415, before the body arrives."""
    async with serving() as served:
        for declared in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""):
            answer = await served.http.post(route, content=b'{"prompt": "x"}', headers={"content-type": declared})
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), declared
        async with await connect(served) as stream:
            await stream.send(head("Content-Length: 1000", path=route).replace(b"application/json", b"text/plain"))
            with anyio.fail_after(10):
                assert b" 415 " in await stream.receive()


@pytest.mark.parametrize(
    "declared", ["application/json", "Application/JSON; Charset=UTF-8", 'application/json;charset="utf-8"; v=1']
)
def test_json_in_utf_8_is_accepted(declared: str) -> None:
    """In any spelling."""
    require_json(Headers({"content-type": declared}))


def test_a_compressed_body_is_refused() -> None:
    """The server has no decompressor, so that a small body stays small."""
    with pytest.raises(ApiError) as raised:
        require_json(Headers({"content-type": "application/json", "content-encoding": "gzip"}))
    assert raised.value.status == 415


async def stalled(served: Served, count: int) -> list[SocketStream]:
    """Open connections whose request body never arrives completely."""
    streams = []
    for _ in range(count):
        stream = await connect(served)
        await stream.send(head("Content-Length: 100") + b"{")
        streams.append(stream)
    return streams


async def test_stalled_bodies_hold_no_slot() -> None:
    """With more stalled bodies than slots, a complete request is answered at once."""
    async with serving(max_concurrent=2) as served:
        streams = await stalled(served, 20)
        assert (await served.post(TEXT, prompt="good")).status_code == 200
        assert served.requests == 1
        for stream in streams:
            await stream.aclose()


@pytest.fixture
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of refused requests close soon."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.05)


@pytest.mark.usefixtures("_short_linger")
async def test_the_oldest_incomplete_body_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends with status 503 and Retry-After; later requests are served."""
    monkeypatch.setattr(bodies, "MAX_INCOMPLETE", 1)
    async with serving() as served:
        (stream,) = await stalled(served, 1)
        async with stream:
            with anyio.fail_after(10):
                answer = (await served.post(TEXT, prompt="good"), await read_all(stream))
        assert answer[0].status_code == 200
        assert b" 503 " in answer[1]
        assert b"retry-after: 1" in answer[1].lower()


@pytest.mark.usefixtures("_short_linger")
async def test_the_memory_of_all_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest incomplete body gives way. The memory is free when the requests have ended."""
    monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 1000)
    async with serving() as served:
        async with await connect(served) as stream:
            await stream.send(head("Content-Length: 2000") + b'{"prompt": "x", "user": "' + b"x" * 700)
            answers = [await served.post(TEXT, prompt="x" * 400)]
            while answers[-1].status_code == 503:
                answers.append(await served.post(TEXT, prompt="x" * 400))
            assert b" 503 " in await read_all(stream)
        assert (await served.post(TEXT, prompt="x", user="u" * 800)).status_code == 200


@pytest.mark.usefixtures("_short_linger")
async def test_a_shutdown_ends_a_request_whose_body_is_incomplete() -> None:
    """Immediately, with status 503."""
    async with serving(shutdown_seconds=10.0) as served:
        (stream,) = await stalled(served, 1)
        async with stream:
            assert (await served.post(TEXT, prompt="good")).status_code == 200
            served.stop()
            answer = await read_all(stream)
    assert b" 503 " in answer
    assert b"shutting_down" in answer


def test_the_rate_allows_a_burst_and_then_makes_its_callers_wait() -> None:
    """The wait is the time in which the rate allows the bytes taken too early."""
    now = 0.0
    rate = ByteRate(10.0, 100.0, clock=lambda: now)
    assert rate.take(100) == 0.0
    assert rate.take(5) == pytest.approx(0.5)
    now = 1000.0
    assert rate.take(100) == 0.0
    assert rate.take(1) == pytest.approx(0.1)


async def test_only_the_bytes_of_large_bodies_count_towards_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bodies never wait."""
    counted: list[int] = []

    class Counting(ByteRate):
        def take(self, count: int) -> float:
            counted.append(count)
            return 0.0

    monkeypatch.setattr(bodies, "ByteRate", Counting)
    reader = RequestBodies(max_bytes=10**6, seconds=10.0)
    for chunks in ([b"x" * bodies.FREE_BYTES], [b"x" * bodies.FREE_BYTES, b"yy", b"z"]):
        waiting: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": chunk is not chunks[-1]} for chunk in chunks
        ]

        async def receive(waiting: list[Message] = waiting) -> Message:
            return waiting.pop(0)

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        async with reader.read(scope, receive) as body:
            assert body == b"".join(chunks)
    assert counted == [2, 1]


def refusal(body: bytes) -> ApiError:
    """Return the error for a body."""
    with pytest.raises(ApiError) as raised:
        json_object(body)
    assert raised.value.status == 400
    assert raised.value.__context__ is None or "Traceback" not in str(raised.value)
    return raised.value


def test_an_object_is_decoded() -> None:
    """Escapes, pairs of surrogates, whitespace and nested values."""
    body = rb' { "a" : "\\\"\u00e9\ud83d\ude00:[{", "b":[1, 2.5, null, true, {"a": []}] } '
    assert json_object(body) == {"a": '\\"é😀:[{', "b": [1, 2.5, None, True, {"a": []}]}


@pytest.mark.parametrize("body", [b'{"a":1,"b":2,"a":3}', b'{"x":[{"a":1,"b":2,"a":3}]}'])
def test_the_duplicate_field_is_named(body: bytes) -> None:
    """At any depth."""
    assert refusal(body).body.error.param == "a"


def test_the_last_of_many_fields_named_twice_is_found_in_one_pass() -> None:
    """The number of comparisons is linear: names count how often they are compared."""
    count = MAX_ELEMENTS - 2
    body = b"{" + b"".join(b'"%x":0,' % number for number in range(count)) + b'"%x":1}' % (count - 1)
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(refusal(body).body.error.param), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [f"{count - 1:x}"]


@pytest.mark.parametrize(
    "element", [b'"%x":0', b'"%x\\\\" : 0', b'"%x":"a:b"'], ids=["fields", "escaped names", "colons in strings"]
)
def test_a_body_with_too_many_fields_is_refused(element: bytes) -> None:
    """A body with as many fields as allowed is decoded. The object itself counts too."""

    def body(count: int) -> bytes:
        return b"{" + b",".join(element % number for number in range(count)) + b"}"

    assert len(json_object(body(MAX_ELEMENTS - 1))) == MAX_ELEMENTS - 1
    assert str(MAX_ELEMENTS) in str(refusal(body(MAX_ELEMENTS)))


@pytest.mark.parametrize("item", [b"[]", b"{}"])
def test_a_body_with_too_many_lists_or_objects_is_refused(item: bytes) -> None:
    """The outer list and its field count too."""
    assert len(json_object(b'{"a":[' + b",".join([item] * (MAX_ELEMENTS - 3)) + b"]}")["a"]) == MAX_ELEMENTS - 3
    refusal(b'{"a":[' + b",".join([item] * (MAX_ELEMENTS - 1)) + b"]}")


def test_the_characters_of_a_text_do_not_count_as_elements() -> None:
    """A long text of braces, colons and escaped quotes is valid."""
    text = '":[{' * MAX_ELEMENTS
    assert json_object(b'{"a":"' + text.replace('"', '\\"').encode() + b'"}') == {"a": text}


@pytest.mark.parametrize("end", [b"", b'"', b"\\", b'\\"'])
def test_an_unterminated_text_is_invalid_json(end: bytes) -> None:
    """The count of elements does not backtrack: the test would not end."""
    assert "not valid JSON" in str(refusal(b'{"a:' + rb"\":" * 500_000 + end))
