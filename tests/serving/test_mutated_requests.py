"""Requests that combine all fields of generation, mutated. The vocabulary is a multiple of 32.

The campaign of `tests/serving/mutated_requests.py` sends the same requests to a process, with adapters.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.serving.embedded_server import serving
from tests.serving.mutated_requests import send_all

REQUESTS = 96


async def test_no_combination_of_fields_is_an_error_of_the_server(tmp_path: Path) -> None:
    """No status above 499 but 503. A valid request after every batch has the same completion as before."""
    async with serving(tmp_path) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=120) as http:
        statuses, failures = await send_all(http, REQUESTS, seed=1)
    assert failures == []
    assert statuses.total() == REQUESTS
    assert statuses["200"] > REQUESTS // 4
