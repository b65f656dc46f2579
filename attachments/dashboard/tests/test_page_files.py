"""The files of the page: headers, validation of cached copies, size, and the rules that keep the page safe."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from attachments.dashboard.page_files import INDEX, PAGE, page_names, page_text
from attachments.dashboard.paths import page_app

MAX_BYTES = 80_000
"""Bytes of all files of the page with its chart library, compressed; the licence is not counted."""


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Return a client of the page alone."""
    return TestClient(page_app())


def test_every_file_has_headers_that_restrict_the_browser(client: TestClient) -> None:
    """Scripts and connections of the own origin only; no file is interpreted as another type."""
    for name in ("", *(f"dashboard/static/{name}" for name in page_names())):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        head = client.head(f"/{name}")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]


def test_a_copy_in_the_browser_is_validated(client: TestClient) -> None:
    """An equal file is not sent again."""
    tag = client.get("/").headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        assert client.get("/", headers={"if-none-match": known}).status_code == 304
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_the_page_is_small(client: TestClient) -> None:
    """A browser receives all files together, with the chart library, in as many bytes as a picture."""
    addresses = ["/", *(f"/dashboard/static/{name}" for name in page_names() - {INDEX} if not name.endswith("LICENSE"))]
    answers = [client.get(address, headers={"accept-encoding": "gzip"}) for address in addresses]
    assert sum(int(answer.headers["content-length"]) for answer in answers) <= MAX_BYTES


@pytest.mark.parametrize(
    ("accepted", "encoding"), [("gzip, br", "gzip"), ("br;q=1, gzip;q=0", None), ("identity", None)]
)
def test_a_file_is_compressed_for_clients_that_accept_it(
    client: TestClient, accepted: str, encoding: str | None
) -> None:
    """Compressed or not, a client reads the same text; caches keep both forms apart."""
    answer = client.get("/dashboard/static/app.js", headers={"accept-encoding": accepted})
    assert answer.headers.get("content-encoding") == encoding
    assert answer.headers["vary"] == "accept-encoding"
    assert answer.text == (PAGE / "app.js").read_text(encoding="utf-8")


def test_no_text_becomes_markup_and_nothing_comes_from_elsewhere() -> None:
    """Model output is untrusted: scripts create text nodes only. Addresses are relative."""
    for name in page_names():
        text = page_text(name)
        if name.endswith((".js", ".html")) and not name.startswith("vendor/"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(", text
            ), name
            assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", text), name
            assert not re.search(r"""\s(?:style|on[a-z]+)=["']""", text), name
