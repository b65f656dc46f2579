"""Atropos' own clients, of every type, against a whole run's engine: what they get is what was sampled."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from msgspec import Struct

from clotho.inference.sample_log import SampledCompletion
from clotho.models.parameters import flat, nested
from clotho.runtime.compute_thread import finish
from tests.atropos.atroposlib_python import python_with_atropos
from tests.serving.embedded_server import EMBEDDED, Notes, serving

SCRIPT = Path(__file__).with_name("atroposlib_clients.py")
CHECKS = [
    "vllm-group", "vllm-stopped", "vllm-turns", "vllm-raw", "vllm-scored", "vllm-text", "vllm-healthy",
    "sglang-group", "sglang-stopped", "sglang-turns", "sglang-raw", "sglang-text", "sglang-healthy",
    "openai-text", "openai-healthy", "trl-text", "trl-healthy",
]  # fmt: skip
END = 2


class Seen(Struct, frozen=True, kw_only=True):
    """What the clients were told, and what was really sampled; versions: how often new weights came meanwhile."""

    told: dict[str, Any]
    notes: Notes
    versions: int
    tokenizer: Any


def command(python: str, url: str, *checks: str) -> list[str]:
    """The clients' process."""
    return [python, str(SCRIPT), url, str(EMBEDDED), *checks]


def offline() -> dict[str, str]:
    """An environment in which nothing is looked up elsewhere."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}


async def ask_everything(python: str, directory: Path) -> Seen:
    """Run all checks while the weights change again and again: after each completion, and within long ones."""
    async with serving(directory) as (url, parts, notes):
        versions = 0
        base = await finish(parts.executor.submit(lambda: flat(parts.policy.trainable())))

        def swap(version: int) -> None:
            weights = {name: value + 1e-3 * (version % 2) for name, value in base.items()}
            parts.policy.publish(nested(weights), version=version, step=version, fingerprint=f"w{version}")

        async def learn() -> None:
            nonlocal versions
            while True:
                versions += 1
                await finish(parts.executor.submit(partial(swap, versions)))
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
        told = json.loads(ended.stdout.decode().strip().splitlines()[-1])
        return Seen(told=told, notes=notes, versions=versions, tokenizer=parts.policy.tokenizer)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One process of clients for all these tests: importing atroposlib takes seconds."""
    python = python_with_atropos()
    return anyio.run(ask_everything, python, tmp_path_factory.mktemp("served"))


def spans(node: dict[str, Any]) -> list[tuple[int, int]]:
    """Where a node is trained on."""
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
    told = np.array(logprobs[start:end], dtype=np.float32)
    assert any(np.array_equal(told, one) for one in same)
    assert np.array_equal(found.logprobs, same[-1])
    return found


def drawn_node(seen: Seen, node: dict[str, Any], start: int, end: int) -> SampledCompletion:
    """The same of a managed server's node, whose mask repeats the tokens."""
    assert node["masked_tokens"][start:end] == node["tokens"][start:end]
    return sampled(seen, node["tokens"], node["logprobs"], start, end)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_group_is_one_request_and_comes_back_as_it_was_drawn(seen: Seen, kind: str) -> None:
    """Sixteen nodes: tokens, masks, log-probabilities, reasons, the end token where one was sampled, and who asked."""
    told = seen.told[f"{kind}-group"]
    assert len({id(request) for request, _ in seen.notes.of(f"{kind}-group")}) == 1
    assert len(told["nodes"]) == 16
    for node, reason in zip(told["nodes"], told["reasons"], strict=True):
        ((start, end),) = spans(node)
        assert end == len(node["tokens"]) == len(node["logprobs"])
        assert node["logprobs"][:start] == [1.0] * start
        found = drawn_node(seen, node, start, end)
        assert (found.client_label, found.temperature, found.unlearnable) == (f"{kind}-group", 0.8, "")
        assert len(found.supports) == end - start
        assert found.finish_reason == reason
        assert (reason == "stop") == (node["tokens"][-1] == END)
    assert {"stop"} <= set(told["reasons"]) <= {"stop", "length"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_stop_string_ends_it_and_its_tokens_are_kept(seen: Seen, kind: str) -> None:
    """The last token here, of which it is a part; the client's text has it too, for it comes from the tokens."""
    told = seen.told[f"{kind}-stopped"]
    assert set(told["reasons"]) == {"stop"}
    for node, text in zip(told["nodes"], told["texts"], strict=True):
        ((start, end),) = spans(node)
        drawn_node(seen, node, start, end)
        assert text.endswith(("<answer>", "</answer>")) or node["tokens"][-1] == END


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_both_turns_of_a_conversation_are_found(seen: Seen, kind: str) -> None:
    """One node with two spans; the client doubles the end token between them, and the engine reads it so."""
    (node,) = seen.told[f"{kind}-turns"]["nodes"]
    (start, end), second = spans(node)
    assert node["tokens"][end - 1 : end + 1] == [END, END]
    assert node["masked_tokens"][end] == -100
    assert drawn_node(seen, node, start, end).client_label == f"{kind}-turns"
    assert drawn_node(seen, node, *second).client_label == f"{kind}-turns"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_tokens_and_log_probabilities_come_without_a_managed_server_too(seen: Seen, kind: str) -> None:
    """The manager splits sixteen into twice eight."""
    told = seen.told[f"{kind}-raw"]
    assert len(told["tokens"]) == 16
    for tokens, logprobs in zip(told["tokens"], told["logprobs"], strict=True):
        prompt, length = told["prompt"], len(told["prompt"])
        assert sampled(seen, prompt + tokens, [1.0] * length + logprobs, length, length + len(tokens))


def test_a_prompt_is_scored_with_its_best_alternatives(seen: Seen) -> None:
    """First the token itself, then the best: nothing for the first token, at least three for the others."""
    told = seen.told["vllm-scored"]
    tokens, ids, logprobs = (told[name] for name in ("prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs"))
    assert len(tokens) == len(ids) == len(logprobs)
    assert (ids[0], logprobs[0]) == ([], [])
    assert [entry[0] for entry in ids[1:]] == tokens[1:]
    for entry, values in zip(ids[1:], logprobs[1:], strict=True):
        assert len(entry) == len(values) in (3, 4)
        assert max(values) <= 0


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_text_is_the_text_of_what_was_drawn(seen: Seen, kind: str) -> None:
    """By OpenAI's routes: sixteen chats, in two requests, and four completions; `n` is heeded."""
    told = seen.told[f"{kind}-text"]
    texts = [completion.text for _, completion in seen.notes.of(f"{kind}-text")]
    assert not told["n_is_ignored"]
    assert sorted(told["chat"] + told["plain"]) == sorted(texts)
    assert len(texts) == 20
    assert set(told["reasons"]) <= {"stop", "length"}


def test_rows_of_tokens_are_what_was_drawn(seen: Seen) -> None:
    """TRL's client sends no key, so it has no label; it decodes the rows itself, the end token included."""
    told = seen.told["trl-text"]
    rows = [completion.tokens for _, completion in seen.notes.of("")]
    texts = ["".join(seen.tokenizer.token_text(token) for token in row) for row in rows]
    assert sorted(told["chat"] + told["plain"]) == sorted(texts)
    assert sorted(told["reasons"]) == sorted("stop" if END in row else "length" for row in rows)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai", "trl"])
def test_the_clients_find_the_server_well(seen: Seen, kind: str) -> None:
    """Two of them by generating a token."""
    assert seen.told[f"{kind}-healthy"] == {"healthy": True}
    generated = seen.notes.of(f"{kind}-healthy", health=True)
    assert bool(generated) == (kind in ("sglang", "openai"))


def test_the_server_is_well_while_the_weights_change(seen: Seen) -> None:
    """Every look at /health was answered with 200, and what was sampled tells of more than one version."""
    assert seen.notes.health
    assert {report.status for report in seen.notes.health} == {"ok"}
    sampled_by = {version for _, completion, _ in seen.notes.taken for version in completion.versions}
    assert len(sampled_by) > 1
    assert max(sampled_by) <= seen.versions


async def test_an_environment_that_is_killed_frees_its_rows(tmp_path: Path) -> None:
    """Its process ends in the middle of a group: the sixteen rows are aborted."""
    python = python_with_atropos()
    async with serving(tmp_path) as (url, parts, _):
        running, left = threading.Event(), threading.Event()

        def hold() -> Generator[None, None, None]:
            while parts.engine.running < 16:
                yield
            running.set()
            assert left.wait(60)

        parts.executor.submit_steps(hold())
        async with await anyio.open_process(command(python, url, "vllm-endless"), env=offline()) as process:
            assert await anyio.to_thread.run_sync(running.wait, 60)
            process.kill()
            await process.wait()
        with anyio.fail_after(60):
            while parts.sampler.running:
                await anyio.lowlevel.checkpoint()
        left.set()
        with anyio.fail_after(60):
            while await finish(parts.executor.submit(lambda: parts.engine.running)):
                await anyio.lowlevel.checkpoint()
        assert parts.engine.stats().finished["abort"] == 16
