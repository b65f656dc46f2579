"""Strict decoding of JSON objects, and its bounds."""

from __future__ import annotations

import threading

import pytest

from clotho.serving.errors import ApiError
from clotho.serving.json_body import MAX_ELEMENTS, json_object


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
