"""All client types of atroposlib with the engine of a run: clients receive what the engine has sampled."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from msgspec import Struct

from attachments.atropos.sample_log import SampledCompletion
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from clotho.lanes.compute_thread import finish
from clotho.models.parameters import flat, nested
from tests.serving.embedded_server import EMBEDDED, RecordedCompletions, serving
from tests.serving.held_engine import HeldEngine

pytestmark = pytest.mark.needs_extra("atroposlib")

SCRIPT = Path(__file__).with_name("atroposlib_clients.py")
CHECKS = [
    "vllm-group", "vllm-stopped", "vllm-turns", "vllm-raw", "vllm-scored", "vllm-text", "vllm-healthy",
    "sglang-group", "sglang-stopped", "sglang-turns", "sglang-raw", "sglang-text", "sglang-healthy",
    "openai-text", "openai-healthy", "trl-text", "trl-healthy",
]  # fmt: skip
END = 2


class Seen(Struct, frozen=True, kw_only=True):
    """The results of the clients and the recorded completions. versions: number of weight swaps."""

    results: dict[str, Any]
    notes: RecordedCompletions
    versions: int
    tokenizer: Any


def command(python: str, url: str, *checks: str) -> list[str]:
    """Return the command of the clients."""
    return [python, str(SCRIPT), url, str(EMBEDDED), *checks]


def offline() -> dict[str, str]:
    """Return environment variables that disable downloads."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}


async def run_all_checks(python: str, directory: Path) -> Seen:
    """Run all checks during repeated weight swaps."""
    async with serving(directory) as (url, parts, notes):
        versions = 0
        base = await finish(parts.compute.decode.submit(lambda: flat(parts.policy.trainable())))

        def swap(version: int) -> None:
            weights = {name: value + 1e-3 * (version % 2) for name, value in base.items()}
            parts.policy.publish(nested(weights), version=version, step=version, fingerprint=f"w{version}")

        async def learn() -> None:
            nonlocal versions
            while True:
                versions += 1
                await finish(parts.compute.decode.submit(partial(swap, versions)))
                notes.heard = anyio.Event()
                with anyio.move_on_after(0.2):
                    await notes.heard.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(learn)
            try:
                with anyio.fail_after(300):
                    ended = await anyio.run_process(command(python, url, *CHECKS), env=offline(), check=False)
            finally:
                tasks.cancel_scope.cancel()
        assert ended.returncode == 0, ended.stderr.decode()[-4000:]
        results = json.loads(ended.stdout.decode().strip().splitlines()[-1])
        return Seen(results=results, notes=notes, versions=versions, tokenizer=parts.policy.tokenizer)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run one client process for all tests, because importing atroposlib takes seconds."""
    python = python_with_atropos()
    return anyio.run(run_all_checks, python, tmp_path_factory.mktemp("served"))


def spans(node: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the trained spans of a node."""
    mask = [0, *(int(label != -100) for label in node["masked_tokens"]), 0]
    edges = np.flatnonzero(np.diff(mask)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def sampled(seen: Seen, tokens: list[int], logprobs: list[float], start: int, end: int) -> SampledCompletion:
    """What the engine remembers of a span; the client's log-probabilities must be those that it was sampled with.

    Where the same was sampled twice, and other weights came in between, the later one is remembered.
    """
    found = seen.notes.log.find(tokens, start, end)
    assert found
    same = [
        np.array(completion.logprobs, dtype=np.float32)
        for request, completion, _ in seen.notes.taken
        if (request.prompt, completion.tokens) == (tuple(tokens[:start]), tuple(tokens[start:end]))
    ]
    results = np.array(logprobs[start:end], dtype=np.float32)
    assert any(np.array_equal(results, one) for one in same)
    assert np.array_equal(found.logprobs, same[-1])
    return found


def recorded_node(seen: Seen, node: dict[str, Any], start: int, end: int) -> SampledCompletion:
    """Return the recorded completion of a span of a node."""
    assert node["masked_tokens"][start:end] == node["tokens"][start:end]
    return sampled(seen, node["tokens"], node["logprobs"], start, end)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_group_is_sampled_in_one_request(seen: Seen, kind: str) -> None:
    """Tokens, masks, log-probabilities, finish reasons and labels equal the recorded completions."""
    results = seen.results[f"{kind}-group"]
    assert len({id(request) for request, _ in seen.notes.of(f"{kind}-group")}) == 1
    assert len(results["nodes"]) == 16
    for node, reason in zip(results["nodes"], results["reasons"], strict=True):
        ((start, end),) = spans(node)
        assert end == len(node["tokens"]) == len(node["logprobs"])
        assert node["logprobs"][:start] == [1.0] * start
        found = recorded_node(seen, node, start, end)
        assert (found.client_label, found.temperature, found.unlearnable) == (f"{kind}-group", 0.8, "")
        assert len(found.supports) == end - start
        assert found.finish_reason == reason
        assert (reason == "stop") == (node["tokens"][-1] == END)
    assert {"stop"} <= set(results["reasons"]) <= {"stop", "length"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_tokens_of_a_stop_string_are_kept(seen: Seen, kind: str) -> None:
    """The client decodes the text from the tokens."""
    results = seen.results[f"{kind}-stopped"]
    assert set(results["reasons"]) == {"stop"}
    for node, text in zip(results["nodes"], results["texts"], strict=True):
        ((start, end),) = spans(node)
        recorded_node(seen, node, start, end)
        assert text.endswith(("<answer>", "</answer>")) or node["tokens"][-1] == END


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_both_turns_of_a_conversation_are_found(seen: Seen, kind: str) -> None:
    """One node with two spans; the client doubles the end token between them, and the engine reads it so."""
    (node,) = seen.results[f"{kind}-turns"]["nodes"]
    (start, end), second = spans(node)
    assert node["tokens"][end - 1 : end + 1] == [END, END]
    assert node["masked_tokens"][end] == -100
    assert recorded_node(seen, node, start, end).client_label == f"{kind}-turns"
    assert recorded_node(seen, node, *second).client_label == f"{kind}-turns"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_tokens_and_log_probabilities_do_not_need_a_managed_server(seen: Seen, kind: str) -> None:
    """The manager sends two requests of eight completions."""
    results = seen.results[f"{kind}-raw"]
    assert len(results["tokens"]) == 16
    for tokens, logprobs in zip(results["tokens"], results["logprobs"], strict=True):
        prompt, length = results["prompt"], len(results["prompt"])
        assert sampled(seen, prompt + tokens, [1.0] * length + logprobs, length, length + len(tokens))


def test_a_prompt_is_scored_with_alternatives(seen: Seen) -> None:
    """The prompt token first; nothing for the first token, at least three entries for the others."""
    results = seen.results["vllm-scored"]
    tokens, ids, logprobs = (
        results[name] for name in ("prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs")
    )
    assert len(tokens) == len(ids) == len(logprobs)
    assert (ids[0], logprobs[0]) == ([], [])
    assert [entry[0] for entry in ids[1:]] == tokens[1:]
    for entry, values in zip(ids[1:], logprobs[1:], strict=True):
        assert len(entry) == len(values) in (3, 4)
        assert max(values) <= 0


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_texts_equal_the_recorded_completions(seen: Seen, kind: str) -> None:
    """Sixteen chat completions in two requests, and four completions."""
    results = seen.results[f"{kind}-text"]
    texts = [completion.text for _, completion in seen.notes.of(f"{kind}-text")]
    assert not results["n_is_ignored"]
    assert sorted(results["chat"] + results["plain"]) == sorted(texts)
    assert len(texts) == 20
    assert set(results["reasons"]) <= {"stop", "length"}


def test_rows_of_tokens_equal_the_recorded_completions(seen: Seen) -> None:
    """TRL's client sends no key and no label; it decodes the rows with the end token."""
    results = seen.results["trl-text"]
    rows = [completion.tokens for _, completion in seen.notes.of("")]
    texts = ["".join(seen.tokenizer.token_text(token) for token in row) for row in rows]
    assert sorted(results["chat"] + results["plain"]) == sorted(texts)
    assert sorted(results["reasons"]) == sorted("stop" if END in row else "length" for row in rows)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai", "trl"])
def test_the_health_checks_of_the_clients_succeed(seen: Seen, kind: str) -> None:
    """Two client types generate one token."""
    assert seen.results[f"{kind}-healthy"] == {"healthy": True}
    generated = seen.notes.of(f"{kind}-healthy", health=True)
    assert bool(generated) == (kind in ("sglang", "openai"))


def test_the_server_is_healthy_during_weight_swaps(seen: Seen) -> None:
    """Every response of /health is ok, and several versions have sampled tokens."""
    assert seen.notes.health
    assert {report.status for report in seen.notes.health} == {"ok"}
    sampled_by = {version for _, completion, _ in seen.notes.taken for version in completion.versions}
    assert len(sampled_by) > 1
    assert max(sampled_by) <= seen.versions


ENDLESS = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"))
body = {"prompt": "1", "n": 16, "max_tokens": 900, "ignore_eos": True}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
connection.getresponse().read()
"""


async def test_a_killed_environment_aborts_its_completions(tmp_path: Path) -> None:
    """The engine aborts all sixteen completions of a process that is killed."""
    async with serving(tmp_path) as (url, parts, _):
        held = HeldEngine(parts.sampler.engine, rows=16)
        async with await anyio.open_process([sys.executable, "-c", ENDLESS, url]) as process:
            assert await anyio.to_thread.run_sync(held.reached.wait, 60)
            process.kill()
            await process.wait()
        with anyio.fail_after(60):
            while parts.sampler.client.running:
                await anyio.lowlevel.checkpoint()
        held.release.set()
        with anyio.fail_after(60):
            while await finish(parts.compute.decode.submit(lambda: parts.sampler.engine.running)):
                await anyio.lowlevel.checkpoint()
        assert parts.sampler.engine.stats().finished["abort"] == 16
