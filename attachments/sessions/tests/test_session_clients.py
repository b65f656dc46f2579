"""Agents of real clients, with tools and streams, train a policy that calls tools."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from profiles.environments.calculator import Calculator
from tests.docs.pages import DOCS, blocks
from tests.docs.test_commands import free_port, is_ready
from tests.e2e.pipeline_process import FEW_PROBLEMS, REPOSITORY, lines, metrics, run

EXTRA = "openai-agents"
PAGE = next(block.text for block in blocks(DOCS / "sessions.md") if block.file_name == "calculator_agent.py")
QUESTION, TURNS, GROUP = "What is 37 plus 47, then times 7?", 3, 4
FUNCTIONS: dict[str, Callable[..., int]] = {
    name: getattr(Calculator(), name) for name in ("add", "multiply", "subtract")
}
FLAGS = (
    "--profile", "local-m3", "--model", str(REPOSITORY / "profiles" / "calculator"), "--sessions", "http",
    "--sampling.group-size", str(GROUP), "--learner.batch-size", "1", "--engine.kv-policy", "recompute",
    "--eval", "off", "--steps", "1", *FEW_PROBLEMS,
)  # fmt: skip

Solve = Callable[[str, str], str]
"""Lets an agent solve the question in a session, given the address of the server, and returns its last message."""


def of_anthropic(address: str, session: str) -> str:
    """Anthropic's client: the session is named by the metadata."""
    import anthropic  # takes 2 seconds

    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("a", "b")},
        "required": ["a", "b"],
    }
    tools: list[Any] = [{"name": name, "input_schema": schema} for name in FUNCTIONS]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=address, api_key="any") as client:
        for _ in range(TURNS):
            with client.messages.stream(
                model="policy",
                max_tokens=24,
                messages=messages,
                tools=tools,
                metadata={"user_id": session},
                extra_body={"seed": len(session)},
            ) as stream:
                answer = stream.get_final_message()
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(called(block.name, block.input))}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            messages += [answer.to_param(), {"role": "user", "content": results}]
        return "".join(block.text for block in answer.content if block.type == "text")


def of_openai_agents(api: str, address: str, session: str) -> str:
    """The Agents SDK of OpenAI: the session is named by a header. A strict tool would be sampled with a grammar."""
    import agents

    models = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    async def solved() -> str:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="any") as client:
            agent = agents.Agent(
                name="calculator",
                tools=[agents.function_tool(function, strict_mode=False) for function in FUNCTIONS.values()],
                model=models[api]("policy", client),
                model_settings=agents.ModelSettings(
                    max_tokens=24, extra_headers={"X-Clotho-Session": session}, extra_body={"seed": len(session)}
                ),
            )
            config = agents.RunConfig(tracing_disabled=True)
            result = agents.Runner.run_streamed(agent, QUESTION, max_turns=TURNS, run_config=config)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    try:
        return asyncio.run(solved())
    except agents.AgentsException:  # no answer after the last turn, or a call of another tool
        return ""


def of_the_page(address: str, session: str) -> str:
    """The agent of docs/sessions.md, with another session and the address of the run."""
    import agents

    mine = PAGE.replace('"attempt-1"}', f'"{session}"}}, extra_body={{"seed": {len(session)}}}')
    assert mine != PAGE
    with redirect_stdout(io.StringIO()) as printed, suppress(agents.AgentsException):
        exec(compile(mine.replace("sys.argv[1]", repr(f"{address}/v1")), "calculator_agent.py", "exec"), {})
    return printed.getvalue()


def called(name: str, arguments: Any) -> int | str:
    """Return the result of a call, or why it failed."""
    try:
        return FUNCTIONS[name](**arguments)
    except (KeyError, TypeError) as error:
        return repr(error)


class Agents(threading.Thread):
    """Solves the question in a session after another, from the start of a run to its end."""

    def __init__(self, port: int, solve: Solve) -> None:
        super().__init__(daemon=True)
        self.port, self.solve, self.ended = port, solve, threading.Event()

    def run(self) -> None:
        """Wait for the server, and let the agent solve; every second session gets the reward 1."""
        while not is_ready(self.port):
            if self.ended.wait(0.02):
                return
        address = f"http://127.0.0.1:{self.port}"
        for number in range(GROUP):
            self.solve(address, f"one{number * '-'}")
            reward = {"session": f"one{number * '-'}", "reward": float(number % 2), "group": "one"}
            httpx.post(f"{address}/v1/rewards", json=reward).raise_for_status()


@pytest.mark.parametrize(
    "solve",
    [
        pytest.param(of_anthropic, id="anthropic"),
        *(
            pytest.param(partial(of_openai_agents, api), id=f"agents-{api}", marks=pytest.mark.needs_extra(EXTRA))
            for api in ("chat", "responses")
        ),
        pytest.param(of_the_page, id="agents-page", marks=pytest.mark.needs_extra(EXTRA)),
    ],
)
def test_an_agent_with_tools_and_streams_trains_the_policy(tmp_path: Path, solve: Solve) -> None:
    """All turns of a session are one sequence: calls as they were sampled, and their results as context."""
    agents = Agents(free_port(), solve)
    agents.start()
    try:
        result = run(tmp_path / "run", *FLAGS, "--server.port", str(agents.port), small=())
    finally:
        agents.ended.set()
        agents.join()
    assert result.status == 0, result.err
    (line,) = metrics(tmp_path / "run")
    assert line["update_applied"]
    assert line["mismatch_kl"] < 1e-9
    assert (line["sessions/rewarded"], line["sessions/forked"], line["sessions/refused"]) == (GROUP, 0, {})
    (group,) = lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(group["completions"]) == GROUP
    assert any("\ntool\n84\nassistant\n" in one["text"] for one in group["completions"])
