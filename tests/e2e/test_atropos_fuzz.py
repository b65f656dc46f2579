"""Floods of groups at the API server: malformed ones are discarded, and more than the trainer needs take no memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from attachments.atropos.tests.api_servers import JSON, ApiServers, ApiServerUnderTest, Real, running
from clotho.models.tokenizer import ChatTokenizer
from tests.e2e.pipeline_process import BATCH, PRINTED_STEPS, REPOSITORY, Run, lines

pytestmark = pytest.mark.needs_extra("atroposlib")

GROUP = 4
STEPS = 3
PAGE = resource.getpagesize()
GROWTH = 32 * 2**20
"""Bytes that a run may grow by under the flood: less than the groups themselves would take."""
POSTED_AT_ONCE = 200
POLL_SECONDS = 0.05
"""Time between two looks at a run that starts, whose imports a busy test would slow."""

TELLING = f"""
extends = "local-m3"
{PRINTED_STEPS}
[[actors]]
name = "telling_groups"
factory = "tests.e2e.custom_components:GroupPrinter"
mode = "tap"
at = "scored"
"""


@cache
def policy_tokenizer() -> ChatTokenizer:
    """Return the tokenizer of `local-m3`."""
    return ChatTokenizer.from_files(REPOSITORY / "profiles" / "embedded")


def valid(number: int) -> dict[str, Any]:
    """Return a trainable group with its own log-probabilities."""
    tokenizer = policy_tokenizer()
    prompt = list(tokenizer.render_chat([{"role": "user", "content": f"What is {number} + 1?"}]))
    answers = [list(tokenizer.encode(f"{number + i}")) for i in range(GROUP)]
    return {
        "tokens": [[*prompt, *answer] for answer in answers],
        "masks": [[*[-100] * len(prompt), *answer] for answer in answers],
        "scores": [float(i) for i in range(GROUP)],
        "inference_logprobs": [[*[1.0] * len(prompt), *[-0.5] * len(answer)] for answer in answers],
    }


def malformed_group(group: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return the group with an invalid value in one of its four sequences."""
    tokens, masks, scores, logprobs = (
        list(group[name]) for name in ("tokens", "masks", "scores", "inference_logprobs")
    )
    i = random.randrange(GROUP)
    match random.randrange(9):
        case 0:
            tokens[i] = [*tokens[i][:-1], random.choice([-1, 10**6, 2**40])]
        case 1:
            masks[i] = masks[i][:-1]
        case 2:
            masks[i] = [0] * (len(masks[i]) - 1) + [1]
        case 3:
            logprobs[i] = [1.0] * len(logprobs[i])
        case 4:
            logprobs[i] = [*logprobs[i][:-1], random.uniform(0.1, 50.0)]
        case 5:
            scores = scores[:-1]
        case 6:
            tokens[i] = tokens[i] * 400
        case 7:
            tokens[i] = []
        case _:
            return group | {"images": ["data:image/png;base64,"], "scores": [random.random() for _ in range(GROUP)]}
    return {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs}


def malformed(count: int) -> Iterator[dict[str, Any]]:
    """Return this number of malformed groups, a function of the index."""
    random = Random(0)
    for number in range(count):
        yield malformed_group(valid(number % 50), random)


@pytest.fixture(scope="module")
def servers() -> Iterator[ApiServers]:
    """The processes of the API server."""
    with ApiServers() as started:
        yield started


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


async def post(server: ApiServerUnderTest, groups: list[dict[str, Any]]) -> None:
    """Send the groups in a few requests."""
    for start in range(0, len(groups), POSTED_AT_ONCE):
        content = msgspec.json.encode(groups[start : start + POSTED_AT_ONCE])
        (await server.http.post("/scored_data_list", content=content, headers=JSON)).raise_for_status()


async def registered(http: httpx.AsyncClient) -> None:
    """Wait until the trainer is registered."""
    while (await http.get("/info")).json()["batch_size"] == -1:  # noqa: ASYNC110 - it tells nobody
        await anyio.sleep(POLL_SECONDS)


@pytest.mark.needs_linux(reason="/proc has the memory of another process")
@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.slow)])
async def test_a_flood_of_malformed_groups_is_discarded(servers: ApiServers, tmp_path: Path, count: int) -> None:
    """Each has its reason and is counted. Training continues before, during and after the flood."""
    profile, run_dir = tmp_path / "telling.toml", tmp_path / "run"
    profile.write_text(TELLING)
    async with running(Real(servers, tmp_path / "log")) as server:
        flags = ("--steps", str(STEPS), "--atropos", "connect")
        with Run(run_dir, "--profile", str(profile), *flags, "--atropos.url", server.url) as trainer:

            async def wait_until(text: str) -> None:
                await anyio.to_thread.run_sync(trainer.wait_for, text)

            with anyio.fail_after(120):
                await registered(server.http)
            flood, held, sent = list(malformed(count)), 0, 0
            for step, part in enumerate((flood[:BATCH], flood[BATCH : count // 10], flood[count // 10 :])):
                await post(server, part)
                sent += len(part) + BATCH
                await wait_until(
                    f"group scored {sent - BATCH - 1}\n"
                )  # the server hands out last first: nothing is left
                if step == 1:
                    held = resident(trainer.process.pid)
                await post(server, [valid(100 * step + number) for number in range(BATCH)])
                await wait_until("step reported")
            assert resident(trainer.process.pid) < held + GROWTH
            result = await anyio.to_thread.run_sync(trainer.finish)
    assert result.status == 0, result
    assert (result.accounting.trained, result.accounting.discarded) == (STEPS * BATCH, count)
    groups = lines(run_dir / "rollouts.jsonl")
    lost = [group for group in groups if group["outcome"] == "discarded"]
    assert {group["reason"] for group in lost} <= {"invalid", "duplicate"}
    assert all(group["detail"] for group in lost)
    assert len({group["detail"] for group in lost}) > 8


@pytest.mark.needs_linux(reason="/proc has the memory of another process")
@pytest.mark.slow
async def test_environments_that_are_faster_than_training_take_no_memory_of_the_trainer(
    servers: ApiServers, tmp_path: Path
) -> None:
    """The trainer fetches groups for `max_batches_ahead` batches beyond the one in training. All others stay with the
    API server, and the memory of the trainer stays flat.
    """
    profile, run_dir, ahead = tmp_path / "telling.toml", tmp_path / "run", 1
    profile.write_text(TELLING)
    async with running(Real(servers, tmp_path / "log")) as server:
        flags = ("--steps", str(STEPS), "--atropos", "connect", "--rollouts.max-batches-ahead", str(ahead))
        with Run(run_dir, "--profile", str(profile), *flags, "--atropos.url", server.url) as trainer:
            with anyio.fail_after(120):
                await registered(server.http)
            flood = [valid(number) for number in range(10_000)]
            await post(server, flood[: 2 * BATCH])
            await anyio.to_thread.run_sync(trainer.wait_for, "step reported")
            held = resident(trainer.process.pid)
            await post(server, flood[2 * BATCH :])
            await anyio.to_thread.run_sync(trainer.wait_for, "step reported")
            await anyio.to_thread.run_sync(trainer.wait_for, "step reported")
            assert resident(trainer.process.pid) < held + GROWTH
            result = await anyio.to_thread.run_sync(trainer.finish)
    assert result.status == 0, result
    accounting = result.accounting
    assert accounting.trained == STEPS * BATCH
    assert accounting.prompted <= (STEPS + ahead + 1) * BATCH


@pytest.mark.slow
async def test_a_silent_environment_is_reported_with_the_reason(servers: ApiServers, tmp_path: Path) -> None:
    """The log names what the trainer waits for. The HTTP API serves meanwhile, and SIGTERM ends the wait."""
    async with running(Real(servers, tmp_path / "log")) as server:
        flags = ("--atropos", "connect", "--atropos.url", server.url, "--atropos.patience-seconds", "0.2")
        with Run(tmp_path / "run", *flags, "--steps", "2") as trainer:
            with anyio.fail_after(120):
                await registered(server.http)
                waits = list[Any]()
                while len(waits) < 2:
                    await anyio.sleep(POLL_SECONDS)
                    log = tmp_path / "run" / "log.jsonl"
                    waits = [event for event in lines(log) if event["event"] == "no_group_received"]
            trainer.send(signal.SIGTERM)
            result = await anyio.to_thread.run_sync(trainer.finish)
    assert result.status == 0, result
    assert {event["waiting_for"] for event in waits} == {"no environment is registered"}
    assert result.accounting.prompted == 0
