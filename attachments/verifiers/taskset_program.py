"""The program of the process that knows verifiers: lists the tasks of a taskset, and plays them.

The script is standalone: it uses verifiers and the standard library, because it runs in the interpreter that has
verifiers 0.4.0. Its argument is a JSON object, the `TasksetProgram` of `messages.py`.

verifiers records every model call on its way from the program of an agent (the harness) to a client. `PolicyClient` is
that client: it asks the run for the message, over a socket, so that prompts are rendered and sampled there.
`ChatHarness` is a light harness: it leads the conversation in this process, where those of verifiers start a process
per rollout. A request of the run is MessagePack behind its length in four bytes, little endian, and so is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

POLICY_URL = "http://policy.invalid/v1"
"""Names the policy as the endpoint of a client; nothing is requested there."""

HARNESS = "clotho-chat"
PARENT_SECONDS = 0.5
MAX_FRAME = 2**20
MAX_TRACEBACK = 16_000
MAX_NAMED = 200
"""Characters of a task's first message that stand for a prompt which the environment writes later."""


def main() -> None:
    """List tasks to the file of the settings, or play tasks until the run closes the socket."""
    settings = json.loads(sys.argv[1])
    if settings["directory"]:
        sys.path.insert(0, settings["directory"])
        paths = filter(None, (settings["directory"], os.environ.get("PYTHONPATH")))
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # servers of tools import the taskset too
    try:
        import verifiers.v1 as vf  # noqa: F401
    except ImportError as error:
        sys.exit(f"verifiers cannot be imported by {sys.executable} ({error}): pip install verifiers==0.4.0")
    sys.modules[HARNESS.replace("-", "_")] = sys.modules[__name__]
    try:
        if settings["tasks_file"]:
            list_tasks(settings)
        else:
            _guard(settings)
            asyncio.run(Player(settings).run())
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _guard(settings: Mapping[str, Any]) -> None:
    """Limit the memory, and end this process when the run has ended, even if it computes."""
    limit = settings["memory_bytes"]
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

    def watch() -> None:
        while os.getppid() == settings["parent"]:
            time.sleep(PARENT_SECONDS)
        time.sleep(10 * PARENT_SECONDS)  # the loop reads the end of its socket and ends tools before
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def configured(settings: Mapping[str, Any]) -> Any:
    """Return the configuration of the environment: agents without a program of their own have `ChatHarness`.

    Agents run on this machine, unless a runtime is configured.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    raw = {**settings["environment"], "taskset": {"id": settings["taskset"], **settings["settings"]}}
    kind = env_config_type(settings["taskset"], raw.get("id") or "")
    bundled = default_harness_id(settings["taskset"]) != "bash"
    roles = {name: field.default for name, field in kind.model_fields.items() if field.default is not None}
    for name, default in agent_config_fields(_Fields(roles)).items():
        role = raw[name] = dict(raw.get(name) or {})
        if default.runtime.type == "prime":
            role.setdefault("runtime", {"type": "subprocess"})
        if (default.harness is None and not bundled) or (default.harness is not None and default.harness.id == "null"):
            role.setdefault("harness", {"id": HARNESS})
    return resolve_env_config(raw)


class _Fields:
    """The default values of a configuration, as what `agent_config_fields` iterates over."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __iter__(self) -> Any:
        return iter(self._values.items())


def list_tasks(settings: Mapping[str, Any]) -> None:
    """Write the data of the tasks to a file, as JSON, with the prompt of each."""
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.utils.loaders import load_taskset

    taskset, count = load_taskset(configured(settings).taskset), settings["tasks"]
    if not taskset.bounded and not count:
        sys.exit(f"the taskset {settings['taskset']} is infinite: set data.verifiers.tasks")
    listed = []
    for task in taskset.take(count) if count else taskset:
        data = task.data
        messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        prompt = data.prompt
        if isinstance(prompt, list):
            messages += [message_to_wire(message) for message in prompt]
        elif prompt is not None:
            messages.append({"role": "user", "content": prompt})
        name = data.name or data.description or f"task {data.idx}"
        text = data.prompt_text if prompt is not None else name[:MAX_NAMED]
        listed.append({"prompt": text, "messages": messages if prompt is not None else [], "data": wire(data)})
    with open(settings["tasks_file"], "w", encoding="utf-8") as file:
        json.dump(listed, file)


def wire(data: Any) -> dict[str, Any]:
    """Return the data of a task as JSON values."""
    found: dict[str, Any] = data.model_dump(mode="json", exclude_defaults=True)
    return found


class RunConnection:
    """The connection with the run."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, number: int, event: str, **fields: Any) -> None:
        """Send an event of an episode. One that is too large becomes the failure of its episode."""
        import msgpack

        content = msgpack.packb({"number": number, "event": {"type": event, **fields}})
        if len(content) > MAX_FRAME:
            text = f"a message of the environment has {len(content)} bytes, and at most {MAX_FRAME} are possible"
            content = msgpack.packb({"number": number, "event": {"type": "Failed", "message": text}})
        self._writer.write(len(content).to_bytes(4, "little") + content)

    async def receive(self) -> dict[str, Any] | None:
        """Wait for a request; None if the run has closed the socket."""
        import msgpack

        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            found: dict[str, Any] = msgpack.unpackb(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return found


class Played:
    """An episode that is played.

    lock: held by the model call that the run answers. tips: by trace, the last message that was sampled, and the tools
    that it could call. cut: traces whose last message the limit on tokens has cut.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        self.turns: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.tips: dict[str, tuple[Any, list[dict[str, Any]]]] = {}
        self.cut: set[str] = set()


class Player:
    """Plays the tasks that the run names. Episodes are tasks of one event loop."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._episodes: dict[int, Played] = {}
        self._of_trace: dict[str, Played] = {}

    async def run(self) -> None:
        """Answer requests until the run closes the socket."""
        from verifiers.v1.clients import ModelContext, TrainClientConfig
        from verifiers.v1.interception import server
        from verifiers.v1.utils.loaders import load_environment

        own = socket.socket(fileno=self._settings["descriptor"])
        self._link = RunConnection(*await asyncio.open_connection(sock=own))
        resolve = server.resolve_client
        policy = policy_client(self._ask)
        server.resolve_client = lambda config: policy if config.base_url == POLICY_URL else resolve(config)
        self._env = load_environment(configured(self._settings))
        self._task_kind = type(self._env.taskset).task_type()
        self._data_kind = self._task_kind.data_type()
        endpoint = TrainClientConfig(base_url=POLICY_URL, api_key_var="CLOTHO_NO_KEY")
        self._context = ModelContext(model="policy", client=endpoint)
        async with self._env.serving():
            self._link.send(0, "TasksetLoaded")
            while (request := await self._link.receive()) is not None:
                self._take(request)
            playing = [one.task for one in self._episodes.values() if one.task is not None]
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    def _take(self, request: Mapping[str, Any]) -> None:
        number = request["number"]
        if request["type"] == "BeginTask":
            played = self._episodes[number] = Played(number)
            played.task = asyncio.create_task(self._play(played, request["task"]))
        elif (found := self._episodes.get(number)) is None:
            self._link.send(number, "Forgotten")
        elif request["type"] == "ContinueTask":
            found.turns.put_nowait(request["turn"])
        elif found.task is not None:
            found.task.cancel()

    async def _play(self, played: Played, data: Mapping[str, Any]) -> None:
        number = played.number

        def watch(trace: Any) -> None:
            self._of_trace[trace.id] = played

        try:
            task = self._task_kind(self._data_kind.model_validate(data), self._env.config.taskset.task)
            (slot,) = self._env.slots(task)
            self._link.send(number, **ended(self._env, await self._env.run_slot(slot, self._context, on_trace=watch)))
        except asyncio.CancelledError:
            self._link.send(number, "Forgotten")
            raise
        except BaseException as error:  # SystemExit would end the process
            end = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
            self._link.send(number, "Failed", message=f"{type(error).__name__}: {error}", traceback=end)
        finally:
            del self._episodes[number]
            self._of_trace = {trace: one for trace, one in self._of_trace.items() if one is not played}

    async def _ask(self, turn: Any, messages: Sequence[Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the next message of the policy in a conversation of a trace, as the run sent it.

        turn: of the graph of the trace, which knows the messages that were there before.
        """
        from verifiers.v1.dialects.chat import message_to_wire

        played, name = self._of_trace[turn.trace.id], turn.trace.id
        async with played.lock:
            tip, prefix, whole = played.tips.get(name), turn.prefix_node_ids, True
            if tip is not None and prefix and turn.trace.nodes[prefix[-1]].message is tip[0] and tools == tip[1]:
                added = [message.role for message in turn.tail]
                whole = not added or not set(added) <= {"user", "tool"}
            if not whole and name in played.cut:
                return {"finish": "limit"}
            sent = [plain(message_to_wire(message)) for message in (messages if whole else turn.tail)]
            asked = {"conversation": name, "messages": sent, "whole": whole, "tools": tools if whole else []}
            errors = 0 if whole else sum(message.role == "tool" and is_error(message) for message in turn.tail)
            self._link.send(played.number, "Ask", tool_errors=errors, **asked)
            found = await played.turns.get()
            played.cut.discard(name)
            if found["finish"] == "length":
                played.cut.add(name)
            return found

    def remember(self, trace: str, message: Any, tools: list[dict[str, Any]]) -> None:
        """Keep the last message that was sampled in a conversation."""
        self._of_trace[trace].tips[trace] = message, tools


def ended(env: Any, episode: Any) -> dict[str, Any]:
    """Return how an episode has ended, as an event: the rewards of its agents that are trained, and their mean."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not env.complete(episode):
        text = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not complete"
        return {"event": "Failed", "message": text, "traceback": (errors[-1].traceback or "") if errors else ""}
    rewards = {one.id: float(one.reward) for one in episode.traces if one.agent.trainable and one.num_turns}
    if any(abs(value) > 1e9 or value != value for value in rewards.values()):
        return {"event": "Failed", "message": f"its reward is {list(rewards.values())}, and not a finite number"}
    mean = sum(rewards.values()) / len(rewards) if rewards else None
    return {"event": "EpisodeEnded", "reward": mean, "rewards": rewards}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is text. Raises ProviderError for an image."""
    from verifiers.v1.errors import ProviderError

    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(part.get("type") != "text" for part in content):
        raise ProviderError("the policy accepts text only", status_code=400)
    return {**message, "content": "\n".join(part["text"] for part in content)}


def is_error(message: Any) -> bool:
    """Whether the result of a tool says that the call failed, as programs of verifiers write it."""
    return isinstance(message.content, str) and message.content.startswith("error")


def policy_client(ask: Any) -> Any:
    """Return the client of the policy."""
    from verifiers.v1.clients import Client
    from verifiers.v1.clients.train import serialize_completion, tool_to_wire
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.errors import ProviderError
    from verifiers.v1.types import AssistantMessage, Response, ToolCall

    class PolicyClient(Client):
        """Asks the run for the next message of the policy."""

        async def get_response(
            self,
            dialect: Any,
            body: dict[str, Any],
            sampling: Any,
            session_id: str | None = None,
            turn: Any = None,
            headers: Mapping[str, str] | None = None,
        ) -> Any:
            """Return the message; raises ProviderError at a limit of the run, which stops the rollout."""
            if not isinstance(dialect, ChatDialect):
                raise ProviderError("the policy is reached by chat completions only", status_code=400)
            found = await ask(turn, turn.prompt, [tool_to_wire(tool) for tool in turn.tools])
            if found["finish"] == "limit":
                turn.trace.stop("run_limit")
                raise ProviderError("the episode has reached a limit of the run", status_code=400)
            calls = [
                ToolCall(id=call["id"] or f"call_{index}", name=call["name"], arguments=call["arguments"])
                for index, call in enumerate(found["calls"])
            ]
            message = AssistantMessage(
                content=found["content"] or None, reasoning_content=found["reasoning"] or None, tool_calls=calls or None
            )
            finish = "length" if found["finish"] == "length" else "tool_calls" if calls else "stop"
            response = Response(id="policy", created=0, model="policy", message=message, finish_reason=finish)
            response.raw = serialize_completion(response, "policy")
            ask.__self__.remember(turn.trace.id, message, [tool_to_wire(tool) for tool in turn.tools])
            return response

    return PolicyClient()


def __getattr__(name: str) -> Any:
    """Return the harness, whose base class is in verifiers."""
    if name != "ChatHarness":
        raise AttributeError(name)
    found = globals()[name] = chat_harness()
    return found


__all__ = ["ChatHarness"]  # noqa: F822  (verifiers finds the class of a plugin by this)


def chat_harness() -> Any:
    """Return the class of the harness."""
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.errors import HarnessError
    from verifiers.v1.harness import Harness
    from verifiers.v1.harnesses.utils.mcp import connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        """Leads the conversation of a task in this process, with the tools of the task. It executes no code."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """Ask until the policy calls no tool, or the rollout is stopped."""
            import aiohttp

            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with contextlib.AsyncExitStack() as stack:
                tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack)
                session = await stack.enter_async_context(
                    aiohttp.ClientSession(
                        headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                    )
                )
                while True:
                    body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                    async with session.post(f"{endpoint}/chat/completions", json=body) as answer:
                        found = await answer.json()
                    if answer.status != 200:
                        if trace.stop_condition is not None:
                            break
                        raise HarnessError(f"the model call failed with status {answer.status}: {found}")
                    message = found["choices"][0]["message"]
                    messages.append(message)
                    calls = message.get("tool_calls") or ()
                    if not calls or found["choices"][0]["finish_reason"] == "length":
                        break
                    messages += [await tool_result(call, dispatch, servers) for call in calls]
            return ProgramResult(exit_code=0, stdout="", stderr="")

    return ChatHarness


async def tool_result(call: Mapping[str, Any], dispatch: Mapping[str, Any], servers: Any) -> dict[str, Any]:
    """Return the result of a call as a message; the policy reads why a call failed."""
    from verifiers.v1.harnesses.utils.mcp import call_mcp

    name, content = call["function"]["name"], ""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no JSON object")
        if name not in dispatch:
            raise ValueError(f"there is no tool {name!r}; tools: {', '.join(dispatch)}")
        content = await call_mcp(servers, dict(dispatch), name, arguments)
    except Exception as error:
        content = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


if __name__ == "__main__":
    main()
