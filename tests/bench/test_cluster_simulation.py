"""The simulation of a cluster: conservation, bounds, closed forms, and what limits the throughput."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from attachments.remote import place as rule
from bench.cluster_costs import Costs, Plan, Workload
from bench.cluster_simulation import FAILED, freest, simulate
from bench.cluster_tally import Forecast

COSTS = Costs(
    step_seconds=2e-3,
    row_seconds=1e-4,
    group_seconds=3e-3,
    update_seconds=0.05,
    update_token_seconds=1e-5,
    version_seconds=0.01,
    score_seconds=0.002,
    publish_seconds=0.001,
    load_seconds=0.004,
    head_group_seconds=1e-4,
    head_call_seconds=1e-5,
    latency_seconds=5e-4,
    weight_bytes=1e5,
    token_bytes=100.0,
)
PLAN = Plan(workers=3, batch_size=4, steps=8, warm_up=4)


def workload(*, zero_variance: float = 0.25) -> Workload:
    """Groups of 4 completions of 1 to 60 tokens."""
    chance = random.Random(7)
    groups = tuple(tuple(chance.randint(1, 60) for _ in range(4)) for _ in range(50))
    return Workload(lengths=groups, zero_variance=tuple(chance.random() < zero_variance for _ in groups))


WORK = workload()
CASES = {
    "asynchronous": (COSTS, PLAN),
    "synchronous": (COSTS, replace(PLAN, synchronous=True, max_batches_ahead=0)),
    "lag": (COSTS, replace(PLAN, synchronous=True, max_batches_ahead=2)),
    "dynamic sampling": (COSTS, replace(PLAN, dynamic_sampling_max_ratio=3.0)),
    "local engine": (COSTS, replace(PLAN, local_share=1.0)),
    "few rows": (COSTS, replace(PLAN, max_num_seqs=6)),
    "failures": (replace(COSTS, failures_per_hour=6000.0, recovery_seconds=0.3, detection_seconds=0.1), PLAN),
    "shared cores": (replace(COSTS, cores=2.0, efficiency=0.8), replace(PLAN, on_learner_machine=True)),
    "slow link": (replace(COSTS, bandwidth=1e6), replace(PLAN, sync_interval=2)),
    "not stale": (replace(COSTS, bandwidth=1e6), replace(PLAN, max_staleness=0, max_batches_ahead=3)),
}


@pytest.fixture(scope="module")
def forecasts() -> dict[str, Forecast]:
    """A simulated run of each case."""
    return {name: simulate(costs, WORK, plan) for name, (costs, plan) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_group_ends_once_or_is_in_flight(forecasts: dict[str, Forecast], case: str) -> None:
    """The staleness rule bounds the groups in flight."""
    found, plan = forecasts[case], CASES[case][1]
    assert found.prompted == found.trained + found.discarded + found.in_flight
    assert found.trained + found.discarded >= (plan.began + plan.steps) * plan.batch_size
    most = (plan.max_batches_ahead + 1) * plan.batch_size
    assert found.in_flight <= most + found.prompted - (plan.began + plan.steps) * plan.batch_size
    if not plan.dynamic_sampling_max_ratio:
        assert found.in_flight <= most


@pytest.mark.parametrize("case", CASES)
def test_shares_of_time(forecasts: dict[str, Forecast], case: str) -> None:
    """A worker is in one state at any time."""
    found = forecasts[case]
    states = (found.decoding, found.waiting_for_weights, found.idle, found.failed)
    assert sum(states) == pytest.approx(1.0)
    for share in (*states, found.learner_busy, found.network_busy, found.loop_busy, found.rewards_busy, found.stale):
        assert 0.0 <= share <= 1.0 + 1e-9


@pytest.mark.parametrize("case", ["asynchronous", "synchronous", "local engine", "few rows", "shared cores"])
def test_the_throughput_is_at_most_that_of_learner_and_workers(forecasts: dict[str, Forecast], case: str) -> None:
    """The learner has an update per batch; a worker has the rate of its full engine."""
    found, (costs, plan) = forecasts[case], CASES[case]
    assert found.updates_per_second * costs.update_seconds <= 1.0
    assert found.groups_per_second <= plan.batch_size / costs.update_seconds
    rows = plan.max_num_seqs
    places = plan.workers + bool(plan.local_share)
    assert found.tokens_per_second <= places * rows / (costs.step_seconds + rows * costs.row_seconds)


def test_what_happens_in_the_cases(forecasts: dict[str, Forecast]) -> None:
    """Failures request groups again, a lag is the staleness, and stale groups are discarded."""
    assert forecasts["failures"].requested_again > 0
    assert forecasts["failures"].failed > 0.0
    assert forecasts["asynchronous"].requested_again == 0
    assert forecasts["synchronous"].staleness_mean == 0.0
    assert forecasts["lag"].staleness_mean == forecasts["lag"].staleness_p95 == 2.0
    assert forecasts["not stale"].stale > 0.0
    assert forecasts["dynamic sampling"].tokens_per_second > 0.0


def test_one_synchronous_worker_equals_the_closed_form() -> None:
    """A batch is decoded, returned and trained on; then the worker gets the weights."""
    work = Workload(lengths=((40,) * 4,), zero_variance=(False,))
    plan = replace(PLAN, workers=1, synchronous=True, max_batches_ahead=0)
    costs = replace(COSTS, score_seconds=0.0, head_group_seconds=0.0, version_seconds=0.0, head_call_seconds=0.0)
    rows, tokens = 4 * 4, 4 * 4 * 40
    decoding = 4 * costs.group_seconds + 40 * (costs.step_seconds + rows * costs.row_seconds)
    update = costs.update_seconds + tokens * costs.update_token_seconds
    weights = costs.publish_seconds + costs.load_seconds + costs.latency_seconds
    found = simulate(costs, work, plan)
    assert 4 / found.groups_per_second == pytest.approx(decoding + 2 * costs.latency_seconds + update + weights)
    assert found.rows == pytest.approx(rows, rel=0.15)


def test_equal_seeds_give_equal_results() -> None:
    """Another seed draws other groups."""
    costs, plan = CASES["failures"]
    assert simulate(costs, WORK, plan) == simulate(costs, WORK, plan)
    assert simulate(costs, WORK, plan) != simulate(costs, WORK, replace(plan, seed=1))


def test_more_bandwidth_is_not_slower() -> None:
    """A slow network is named as the bottleneck, and a fast one is not."""
    work = Workload(lengths=WORK.lengths, zero_variance=(False,) * len(WORK.lengths))
    found = [simulate(replace(COSTS, bandwidth=rate), work, PLAN) for rate in (1e5, 1e6, 1e7, 1e8)]
    rates = [one.groups_per_second for one in found]
    assert rates == sorted(rates)
    assert found[0].bottleneck == "network"
    assert found[-1].bottleneck != "network"


@pytest.mark.parametrize(
    ("costs", "plan", "bottleneck"),
    [
        (replace(COSTS, update_seconds=2.0), PLAN, "learner"),
        (replace(COSTS, step_seconds=0.1), PLAN, "workers"),
        (replace(COSTS, latency_seconds=0.5), replace(PLAN, max_batches_ahead=1), "batches ahead"),
        (replace(COSTS, score_seconds=1.0), PLAN, "rewards"),
        (replace(COSTS, head_call_seconds=0.32), PLAN, "event loop"),
        (replace(COSTS, failures_per_hour=3600.0, recovery_seconds=9.0), PLAN, "failures"),
    ],
)
def test_the_bottleneck_is_named(costs: Costs, plan: Plan, bottleneck: str) -> None:
    """What is slow is what limits the throughput."""
    assert simulate(costs, WORK, plan).bottleneck == bottleneck


class Place(Struct):
    """A worker, as the sampler of the program sees it."""

    version: int | None
    rows: int
    share: float


def test_groups_go_to_the_worker_that_the_program_chooses() -> None:
    """The rule on arrays is the rule of the sampler."""
    chance = random.Random(3)
    for _ in range(300):
        places = [
            Place(chance.choice((None, 3, 4, 5)), 8 * chance.randrange(4), chance.choice((0.5, 1.0)))
            for _ in range(chance.randint(1, 5))
        ]
        waiting = 8 * chance.randint(1, 3)
        chosen = rule.freest(places, oldest=4, waiting=waiting)
        number = freest(
            np.array([FAILED if place.version is None else place.version for place in places]),
            np.array([float(place.rows) for place in places]),
            np.array([place.share for place in places]),
            oldest=4,
            waiting=waiting,
        )
        assert (None if number is None else places[number]) is chosen


def test_changed_groups() -> None:
    """Length, size and share of zero-variance groups are as asked for."""
    found = WORK.changed(mean_tokens=500.0, group_size=8, zero_variance=0.1)
    assert found.mean_tokens == pytest.approx(500.0, rel=0.01)
    assert {len(group) for group in found.lengths} == {8}
    assert sum(found.zero_variance) == len(found.lengths) // 10
