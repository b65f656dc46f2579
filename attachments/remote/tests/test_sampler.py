"""Rollouts of remote inference servers: current weights, faults without a lost or repeated group, and wrong data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest
from msgspec import structs

from attachments.remote import sampler as module
from attachments.remote.messages import ServedPolicy
from attachments.remote.sampler import RemoteSampler
from attachments.remote.tests.inference_server import InferenceServer, TrainingRun, group, running, servers, until
from attachments.remote.tests.test_comparison import trained
from attachments.remote.weights import Weights
from clotho.storage.tensors import named_arrays, tensor_bytes
from protocols.errors import RemoteError, RequestError
from protocols.sampling import Completion, PromptLogprobs, SampleRequest, Sampling


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask servers for their state, and give up on one, after a fraction of the usual time."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.05)


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    """Return the tokens of all completions, which their seeds determine; log-probabilities are rounded by batch."""
    return [[completion.tokens for completion in completions] for completions in groups]


async def sampled(sampler: RemoteSampler, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
    """Return the completions of every group; each group ends exactly once."""
    done: dict[int, list[Completion]] = {}
    async with aclosing(sampler.groups(requests)) as outcomes:
        async for position, outcome in outcomes:
            assert position not in done
            assert isinstance(outcome, list), outcome
            done[position] = outcome
    return [done[position] for position in range(len(requests))]


async def test_groups_are_sampled_by_all_servers(tmp_path: Path) -> None:
    """A group goes to the server with the fewest rows in flight."""
    with servers(tmp_path, 3) as [local, one, other]:
        sampler = TrainingRun(local).sampler(one.client(8001), other.client(8002))
        async with running(sampler, usable=2):
            groups = await sampled(sampler, [group(seed) for seed in range(8)])
    assert [len(completions) for completions in groups] == [2] * 8
    for server in (one, other):
        assert server.connection.calls.count("POST /v1/rollouts") >= 3


async def test_a_group_starts_only_on_the_newest_weights(tmp_path: Path) -> None:
    """The new weights are announced first; the group waits until a server has them."""
    with servers(tmp_path, 2) as [local, remote]:
        run = TrainingRun(local)
        sampler = run.sampler(remote.client())
        async with running(sampler):
            await sampled(sampler, [group()])
            for version in (1, 2):
                digest = await run.update(version)
                [completions] = await sampled(sampler, [group()])
                assert {v for completion in completions for v in completion.versions} == {version}
                assert remote.policy.fingerprint == digest


async def test_groups_that_wait_for_weights_are_divided(tmp_path: Path) -> None:
    """The first server with the new weights has at most its share of the rows; the other one gets groups too."""
    with servers(tmp_path, 3) as [local, one, other]:
        run, slow, permitted = TrainingRun(local), other.client(8002), anyio.Event()
        sampler = run.sampler(one.client(8001), slow)
        places, push, highest = sampler._places, slow.push, 0

        async def push_later(weights: Weights) -> ServedPolicy:
            await permitted.wait()
            return await push(weights)

        def has_groups() -> bool:
            nonlocal highest
            highest = max(highest, places[0].rows)
            return highest > 0

        async with running(sampler, usable=2), anyio.create_task_group() as tasks:
            slow.push = push_later  # type: ignore[method-assign]
            one.connection.delayed = anyio.Event()
            await run.update(1)
            tasks.start_soon(sampled, sampler, [group(seed) for seed in range(8)])
            await until(has_groups)
            permitted.set()
            await until(lambda: places[1].groups > 0)
            one.connection.delayed.set()
    assert highest == 8
    assert places[0].groups + places[1].groups == 8


async def test_weights_are_sent_after_every_interval(tmp_path: Path) -> None:
    """With `sync_interval = 2`, a server may be one version behind, and gets every second version."""
    with servers(tmp_path, 2) as [local, remote]:
        run = TrainingRun(local)
        sampler = run.sampler(remote.client(), sync_interval=2)
        async with running(sampler):
            versions = []
            for version in range(1, 5):
                await run.update(version)
                [completions] = await sampled(sampler, [group()])
                versions.append(completions[0].versions[0])
    assert versions == [0, 2, 2, 4]


@pytest.mark.parametrize("fault", ["down", "hangs"])
async def test_groups_of_a_failed_server_are_sampled_elsewhere(tmp_path: Path, fault: str) -> None:
    """A killed process refuses connections; a stopped one does not answer. Both get groups again when they answer."""
    with servers(tmp_path, 3) as [local, one, other]:
        sampler = TrainingRun(local).sampler(one.client(8001), other.client(8002))
        async with running(sampler, usable=2):
            expected = tokens(await sampled(sampler, [group(seed) for seed in range(4)]))
            setattr(one.connection, fault, True)
            assert tokens(await sampled(sampler, [group(seed) for seed in range(4)])) == expected
            await until(lambda: sampler._places[0].version is None)
            one.connection.calls.clear()
            setattr(one.connection, fault, False)
            await until(lambda: sampler._places[0].version is not None)
            assert tokens(await sampled(sampler, [group(seed) for seed in range(4)])) == expected
            assert "POST /v1/rollouts" in one.connection.calls


async def test_a_restarted_server_gets_the_current_weights(tmp_path: Path) -> None:
    """It serves its initial weights after the restart, and no group until it has been updated."""
    with servers(tmp_path, 3) as [local, first, restarted]:
        run = TrainingRun(local)
        client = first.client()
        sampler = run.sampler(client)
        async with running(sampler):
            await run.update(1)
            await sampled(sampler, [group()])
            first.connection._inner = restarted.connection._inner
            [completions] = await sampled(sampler, [group()])
            assert {v for completion in completions for v in completion.versions} == {1}
        assert restarted.policy.version == 1
        assert sampler.gauges().servers[0].restarts == 1


def older(request: httpx.Request, body: bytes) -> bytes:
    """Name another fingerprint in the answers to rollouts."""
    return body.replace(b'"fingerprints":{"0":"', b'"fingerprints":{"0":"x') if "rollouts" in request.url.path else body


def shifted(request: httpx.Request, body: bytes) -> bytes:
    """Change the log-probabilities in the answers to rollouts."""
    if "rollouts" not in request.url.path:
        return body
    fields = msgspec.json.decode(body)
    for completion in fields["completions"]:
        completion["logprobs"] = [logprob - 0.5 for logprob in completion["logprobs"]]
    return msgspec.json.encode(fields)


def outside(request: httpx.Request, body: bytes) -> bytes:
    """Name a token that no vocabulary contains in the answers to rollouts."""
    if "rollouts" not in request.url.path:
        return body
    fields = msgspec.json.decode(body)
    for completion in fields["completions"]:
        completion["tokens"][0] = 10**9
    return msgspec.json.encode(fields)


def garbage(request: httpx.Request, body: bytes) -> bytes:
    """Return no JSON."""
    return b"\xff" + body if "rollouts" in request.url.path else body


@pytest.mark.parametrize("change", [older, shifted, outside, garbage])
async def test_a_server_with_wrong_data_gets_no_groups(tmp_path: Path, change: module.Recompute) -> None:
    """Other fingerprints, other log-probabilities than the learner's, unknown tokens, or no JSON: the probe fails."""
    with servers(tmp_path, 3) as [local, wrong, right]:
        wrong.connection.change = change  # type: ignore[assignment]
        sampler = TrainingRun(local).sampler(wrong.client(8001), right.client(8002))
        async with running(sampler):
            await until(lambda: sampler._places[0].failures > 1)
            await sampled(sampler, [group(seed) for seed in range(4)])
            assert sampler._places[0].version is None


@pytest.mark.parametrize("change", [older, outside])
async def test_wrong_data_of_a_server_in_use_is_sampled_again(tmp_path: Path, change: module.Recompute) -> None:
    """The server passed the probe and then names another fingerprint, or a token that is in no vocabulary."""
    with servers(tmp_path, 3) as [local, wrong, right]:
        sampler = TrainingRun(local).sampler(wrong.client(8001), right.client(8002))
        async with running(sampler, usable=2):
            expected = tokens(await sampled(sampler, [group(seed) for seed in range(4)]))
            wrong.connection.change = change  # type: ignore[assignment]
            assert tokens(await sampled(sampler, [group(seed) for seed in range(4)])) == expected
    assert sampler.retries >= 1


async def test_a_probe_during_a_change_of_weights_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has compared nothing. The server is in use meanwhile."""
    monkeypatch.setattr(module, "PROBE_SECONDS", 1e6)
    changes = [True, True]
    with servers(tmp_path, 2) as [local, remote]:

        async def recompute(tokens: tuple[int, ...], _: float) -> PromptLogprobs:
            scored = await local.prompt_logprobs(tokens, 0)
            return structs.replace(scored, version=scored.version + 1) if changes and changes.pop() else scored

        sampler = TrainingRun(local).sampler(remote.client(), recompute=recompute)
        async with running(sampler):
            await until(lambda: not changes and sampler._places[0].probed_at > 0)
            assert not sampler._places[0].all_failures


async def test_a_server_that_differs_from_an_update_is_probed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed its first probe, and returns other log-probabilities since then."""
    monkeypatch.setattr(module, "PROBE_SECONDS", 1e6)
    monkeypatch.setattr(module, "SUSPICION_SECONDS", 0.0)
    with servers(tmp_path, 2) as [local, wrong]:
        run = TrainingRun(local)
        sampler = run.sampler(wrong.client())
        async with running(sampler):
            wrong.connection.change = shifted
            await sampled(sampler, [group(1), group(2)])
            await run.update(1, trained=(trained(1, (-1.0,), (-1.05,)),))
            await sampled(sampler, [group(3)])
            assert sampler._places[0].probed_at > 0, "a small difference is that of the weights"
            await run.update(2, trained=(trained(2, (-1.5,), (-1.0,)),))
            await until(lambda: sampler._places[0].failures > 1)
            assert sampler._places[0].version is None


@pytest.mark.parametrize("reason", ["layout", "other run"])
async def test_a_server_that_is_not_suitable_gets_neither_weights_nor_groups(tmp_path: Path, reason: str) -> None:
    """It has other trainable parameters, or another run has sent its weights meanwhile."""
    with servers(tmp_path, 2) as [local, remote]:
        run = TrainingRun(local)
        sampler = run.sampler(remote.client(), **({"layout": "other"} if reason == "layout" else {}))
        if reason == "other run":
            sampler._places[0].owned = True
            remote.receiver._run_id = "another"
        async with running(sampler, usable=0):
            await until(lambda: sampler._places[0].failures > 1)
        assert not {"PUT /v1/policy/weights", "POST /v1/rollouts"} & set(remote.connection.calls)


async def test_a_request_that_a_server_refuses_ends_with_its_error(tmp_path: Path) -> None:
    """The other requests of the call continue."""
    with servers(tmp_path, 2) as [local, remote]:
        sampler = TrainingRun(local).sampler(remote.client())
        async with running(sampler):
            refused = group(prompt=(9999,), sampling=Sampling(max_tokens=2))
            async with aclosing(sampler.groups([refused, group()])) as results:
                outcomes = {position: outcome async for position, outcome in results}
    assert isinstance(outcomes[0], RequestError)
    assert isinstance(outcomes[1], list)


async def test_the_run_fails_without_a_usable_server(tmp_path: Path) -> None:
    """After the permitted time, with the names of the servers."""
    with servers(tmp_path, 2) as [local, remote]:
        remote.connection.down = True
        sampler = TrainingRun(local).sampler(remote.client(8003), patience_seconds=0.05)
        with pytest.RaisesGroup(RemoteError, flatten_subgroups=True) as failed:
            await sampler.run()
        assert "http://127.0.0.1:8003" in str(failed.value.exceptions[0])


async def test_a_server_is_restarted_when_its_groups_are_completed(tmp_path: Path) -> None:
    """Groups in flight are not lost, and no group starts on the old weights meanwhile."""
    with servers(tmp_path, 2) as [local, remote]:
        run = TrainingRun(local)
        client = remote.client()
        client.restarts = True
        sampler = run.sampler(client)
        async with running(sampler), anyio.create_task_group() as tasks:
            remote.connection.delayed = anyio.Event()
            groups: list[Completion] = []

            async def one() -> None:
                groups.extend((await sampled(sampler, [group()]))[0])

            tasks.start_soon(one)
            await until(lambda: sampler._places[0].rows == 2)
            await run.update(1)
            await until(lambda: sampler._places[0].version is None)
            assert sampler._places[0].in_use
            assert "PUT /v1/policy/weights" not in remote.connection.calls
            remote.connection.delayed.set()
            await until(lambda: sampler._places[0].version == 1)
    assert [completion.versions[0] for completion in groups] == [0, 0]
    assert sampler.retries == 0


async def test_the_metrics_count_groups_failures_and_pushes(tmp_path: Path) -> None:
    """The lag is counted from the weights that the run serves."""
    with servers(tmp_path, 2) as [local, remote]:
        run = TrainingRun(local)
        sampler = run.sampler(remote.client(), sync_interval=2)
        (before,) = sampler.gauges().servers
        assert (before.state, before.version, before.lag) == ("updating", None, None)
        async with running(sampler):
            await run.update(1)
            await sampled(sampler, [group()])
            (behind,) = sampler.gauges().servers
            assert (behind.state, behind.version, behind.lag, behind.groups) == ("ready", 0, 1, 1)
            await run.update(2)
            await until(lambda: sampler._places[0].version == 2)
            remote.connection.down = True
            await until(lambda: sampler._places[0].version is None)
            (failed,) = sampler.gauges().servers
    assert (failed.state, failed.version, failed.name) == ("failed", None, "http://127.0.0.1:8000")
    assert failed.failures >= 1
    assert sum(failed.pushes.counts) == 1
    assert failed.push_seconds == failed.pushes.total
    assert failed.tokens == sampler.gauges().tokens_sampled > 0
    assert failed.restarts == 0
    assert failed.bytes_sent > len(tensor_bytes(named_arrays(local.policy.trainable())))
    assert failed.bytes_received > 0


async def test_the_sampler_ends_with_the_learner(tmp_path: Path) -> None:
    """The queue of updates ends."""
    with servers(tmp_path, 2) as [local, remote]:
        run = TrainingRun(local)
        sampler = run.sampler(remote.client())
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sampler.run)
                run.outbox.close()


async def test_cancelled_groups_end_on_the_server(tmp_path: Path) -> None:
    """The consumer leaves; no request stays in flight."""
    with servers(tmp_path, 2) as [local, remote]:
        sampler = TrainingRun(local).sampler(remote.client())
        async with running(sampler):
            await sampled(sampler, [group()])
            remote.connection.holds = True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sampled, sampler, [group(1), group(2)])
                await until(lambda: sampler._places[0].rows == 4)
                tasks.cancel_scope.cancel()
            assert sampler._places[0].rows == 0


def test_the_harness_has_equal_policies(tmp_path: Path) -> None:
    """Otherwise a probe would fail."""
    with servers(tmp_path, 2) as [one, other]:
        assert isinstance(one, InferenceServer)
        assert one.policy.fingerprint == other.policy.fingerprint


async def test_a_server_that_stops_while_it_gets_weights_fails(tmp_path: Path) -> None:
    """The run does not wait for as long as large weights may take; the groups of the server are sampled elsewhere."""
    with servers(tmp_path, 3) as [local, one, other]:
        run = TrainingRun(local)
        stopping = one.client(8001)
        sampler = run.sampler(stopping, other.client(8002))
        push = stopping.push

        async def stop_and_push(weights: Weights) -> ServedPolicy:
            one.connection.hangs = True
            return await push(weights)

        async with running(sampler, usable=2):
            stopping.push = stop_and_push  # type: ignore[method-assign]
            await run.update(1)
            await until(lambda: sampler._places[0].failures > 0)
            groups = await sampled(sampler, [group(seed) for seed in range(4)])
        assert {version for completions in groups for one in completions for version in one.versions} == {1}
