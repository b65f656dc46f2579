"""`visitors`: rates of a period, and their ratios to those of the neighbouring periods without long requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from bench import visitors
from bench.visitors import Host, Service, Tally, ask_again_and_again, period, rates_of
from tests.bench.fake_server import fake_server
from tests.bench.made_measurements import measurement

SERVED = ("client_tokens_per_second", "long_tokens_per_second")


def test_only_whole_updates_count() -> None:
    """The rates are those between two updates, wherever the period begins and ends."""
    before = [(1.0, 100), (2.0, 100)]
    rates = rates_of(before, [*before, (4.0, 300), (6.0, 500)])
    assert rates == {"rollout_tokens_per_second": 200.0, "updates_per_second": 0.5}


def test_every_client_of_a_period_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long requests are streams, the other clients of `serve` are not, and short requests are measured.

    A busy machine gets periods that are longer each time, until every client has been served in one.
    """
    monkeypatch.setattr(visitors, "PAUSE", 0.0)
    metrics: dict[str, float] = {}
    with fake_server() as (port, asked):
        for seconds in (0.5, 2.0, 8.0, 32.0):
            with suppress(RuntimeError):
                metrics = asyncio.run(period(Service(port, None), 2, Host(0, 1000), seconds=seconds))
            if metrics and min(metrics[name] for name in SERVED) > 0:
                break
    assert {(body["max_tokens"], bool(body.get("stream"))) for body in asked} == {
        (1000, True), (visitors.CLIENT_TOKENS, False), (4, True)
    }  # fmt: skip
    assert 0 < metrics["first_token_median"] <= metrics["first_token_p95"]
    assert all(metrics[name] > 0 for name in SERVED)


def test_a_refused_request_ends_the_measurement() -> None:
    """The rates would be those beside fewer long requests."""
    with fake_server(status=503) as (port, _), pytest.raises(ValueError, match="503"):
        asyncio.run(period(Service(port, None), 1, Host(0, 1000), seconds=0.5))


def test_all_tokens_of_clients_that_wait_at_the_same_time_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives while a client waits for its own answer is not lost."""
    left = list(range(12))

    async def answered(*_: object) -> float:
        left.pop()
        await asyncio.sleep(0)
        return 5.0

    async def ask(tally: Tally) -> None:
        asking = (ask_again_and_again(Service(0, None), number, tally) for number in range(4))
        await asyncio.gather(*asking, return_exceptions=True)

    monkeypatch.setattr(visitors, "answered_tokens", answered)
    tally = Tally()
    asyncio.run(ask(tally))
    assert tally.client_tokens == 5.0 * 12


def test_ratios_are_taken_to_the_periods_before_and_after() -> None:
    """Each rate beside 8 long requests is divided by the mean of the second and third rate alone of its repeat."""
    results = [
        measurement(values, contender=who, metric="updates_per_second", service="run", group_size=8, max_tokens=1000)
        for who, values in (("0", [9.0, 0.5, 1.5, 9.0, 9.0, 4.0, 4.0, 9.0]), ("8", [0.5, 1.0]))
    ]
    assert "[0.375 (0.250 to 0.500)]" in visitors.table(results)
