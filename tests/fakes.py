"""A decode engine without a model.

Tokens are a function of prompt, sampling parameters, seed and position. `tests/lanes/test_sampling_client.py` checks
it against the contract of the real engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any, Literal, TypeVar

import anyio

from protocols.constraints import Constraint, ConstraintState, Grammar
from protocols.errors import ExecutorStoppedError, RequestError
from protocols.sampling import Completion, CompletionDone, SampleEvent, SampleFailed, SampleRequest, TokenSampled

T = TypeVar("T")
END = 96


class FakeConstraint:
    """A constraint that records what it was compiled from."""

    def __init__(self, grammar: Grammar, vocabulary: int) -> None:
        self.grammar, self.vocabulary = grammar, vocabulary

    def start(self) -> ConstraintState:
        """Fail: the fake engine constrains nothing."""
        raise NotImplementedError


class CharacterTokenizer:
    """A tokenizer with one token per character: 0 to 94 are printable ASCII, 95 is a newline, 96 ends a sequence."""

    eos_ids = frozenset({END})
    vocab_size = 97
    longest_token_bytes = 4  # a character outside ASCII
    chat_template = "{{ messages }} {{ tools }} <tool_call>"
    special_tokens: Mapping[str, str] = {"eos_token": "<end>"}

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return one token per character. Characters outside ASCII become a question mark."""
        return tuple(95 if one == "\n" else ord(one) - 32 if " " <= one <= "~" else 31 for one in text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Return one line per message, and one for variables."""
        del tools
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        text = (f"{dict(variables)}\n" if variables else "") + "".join(lines)
        if continue_final_message:
            return self.encode(text.removesuffix("\n"))
        return self.encode(text + ("assistant: " if add_generation_prompt else ""))

    def render_chats(self, chats: Sequence[Any], /) -> list[tuple[int, ...]]:
        """Render each."""
        return [self.render_chat(chat.messages, tools=chat.tools) for chat in chats]

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """Return the characters."""
        return "".join(self.token_text(token) for token in tokens if token != END or not skip_special_tokens)

    def compile_grammar(self, grammar: Grammar, vocabulary: int, /) -> Constraint:
        """Return a constraint that the fake engine does not apply."""
        return FakeConstraint(grammar, vocabulary)

    def token_text(self, token: int, /) -> str:
        """Return one character, or the name of the end token."""
        return "<end>" if token == END else "\n" if token == 95 else chr(32 + token)


class _Row:
    def __init__(self, index: int, seed: int, request: SampleRequest) -> None:
        self.index, self.seed, self.request = index, seed, request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.sent = 0


class FakeEngine:
    """An engine with its compute thread. `submit_call` stands for the compute thread's `submit`."""

    def __init__(self, tokenizer: CharacterTokenizer | None = None) -> None:
        self.tokenizer = tokenizer or CharacterTokenizer()
        self.version = 0
        self.refusal: RequestError | None = None
        self.requests: list[SampleRequest] = []
        self.aborted: list[int] = []
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fake-compute")
        self._running: dict[int, tuple[list[_Row], Callable[[SampleEvent], None]]] = {}
        self._changed = threading.Condition()
        self._allowed = 10**9
        self._ticking = False
        self.held: Literal["nothing", "admission", "everything"] = "nothing"

    def submit_call(self, work: Callable[[], T], /) -> Future[T]:
        """Run in the compute thread, or raise ExecutorStoppedError as a compute thread does."""
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise ExecutorStoppedError(str(error)) from error

    def close(self) -> None:
        """Stop the compute thread."""
        self._pool.shutdown(cancel_futures=True)

    def submit(self, request: SampleRequest, listener: Callable[[SampleEvent], None], /) -> int:
        """Accept a request, or raise the refusal that the test set."""
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        request_id = len(self.requests)
        rows = [_Row(index, seed, request) for index, seed in enumerate(request.seeds)]
        self._running[request_id] = (rows, listener)
        self._schedule()
        return request_id

    def abort(self, request_id: int, /) -> None:
        """Free the rows of a request."""
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)
        self._schedule()

    def abort_clients(self, request_ids: Collection[str] | None, /, client: str = "") -> int:
        """End requests by their names as aborted; None: all. client: only those of this client; empty: of all."""
        found = [
            number
            for number in self._running
            if (request_ids is None or self.requests[number - 1].request_id in request_ids)
            and client in ("", self.requests[number - 1].client)
        ]
        for number in found:
            rows, listener = self._running.pop(number)
            for row in rows:
                listener(self._done(row, self.tokenizer.decode(row.tokens), "abort", None))
        self._schedule()
        return len(found)

    def release_caches(self) -> None:
        """Do nothing: there are no caches."""

    def fail(self, reason: str) -> None:
        """Fail all running requests. Called in the compute thread."""
        for _, listener in self._running.values():
            listener(SampleFailed(reason=reason))
        self._running.clear()
        self._schedule()

    def allow(self, ticks: int) -> None:
        """Allow this number of further ticks."""
        self._allowed = ticks
        self._pool.submit(self._schedule)

    @property
    def running(self) -> int:
        """Number of running rows, in any thread: a copy of the values is one operation of the interpreter."""
        return sum(len(rows) for rows, _ in list(self._running.values()))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait at most 10 seconds until the condition holds."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(condition, timeout=10)

        if not await anyio.to_thread.run_sync(wait):
            raise TimeoutError("the fake engine did not get there")

    def _schedule(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._running and self._allowed > 0 and not self._ticking:
            self._ticking = True
            self._pool.submit(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self._allowed <= 0:
            return
        self._allowed -= 1
        for request_id, (rows, listener) in list(self._running.items()):
            self._running[request_id] = ([row for row in rows if not self._advance(row, listener)], listener)
            if not self._running[request_id][0]:
                del self._running[request_id]
        self._schedule()

    def _advance(self, row: _Row, listener: Callable[[SampleEvent], None]) -> bool:
        """Sample one token and return whether the row has ended."""
        token, logprob = fake_token(row.request, row.seed, len(row.tokens))
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(self.version)
        text, reason, cause = self._ending(row)
        certain = len(text) - _held_back(text, row.request.sampling.stop) if reason is None else row.sent
        if row.request.stream:
            top = alternatives(token, logprob, row.request.sampling.top_logprobs)
            new = text[row.sent : certain]
            row.sent = max(row.sent, certain)
            event = TokenSampled(
                index=row.index, token=token, logprob=logprob, version=self.version, text=new, top_logprobs=top
            )
            listener(event)
        if reason is not None:
            listener(self._done(row, text, reason, cause))
        return reason is not None

    def _ending(self, row: _Row) -> tuple[str, Any, str | int | None]:
        sampling = row.request.sampling
        text, last = self.tokenizer.decode(row.tokens), row.tokens[-1]
        found = min((at, stop) for stop in (*sampling.stop, "") if (at := text.find(stop) if stop else 10**9) >= 0)
        if found[1]:
            return text[: found[0]], "stop", found[1]
        if last in sampling.stop_token_ids or (last == END and not sampling.ignore_eos):
            return text, "stop", last
        return text, "length" if len(row.tokens) == sampling.max_tokens else None, None

    def _done(self, row: _Row, text: str, reason: Any, cause: str | int | None) -> CompletionDone:
        count = row.request.sampling.top_logprobs
        completion = Completion(
            tokens=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            versions=tuple(row.versions),
            text=text,
            finish_reason=reason,
            stop_reason=cause,
            top_logprobs=tuple(
                alternatives(token, logprob, count) for token, logprob in zip(row.tokens, row.logprobs, strict=True)
            )
            if count
            else (),
        )
        return CompletionDone(index=row.index, completion=completion, tail=text[row.sent :])


def fake_token(request: SampleRequest, seed: int, position: int) -> tuple[int, float]:
    """Return the token at a position and its log-probability."""
    sampling = request.sampling
    source = Random(f"{0 if sampling.temperature == 0 else seed}/{position}/{request.prompt}")
    ends = source.random() < 0.01
    token = END if ends and not sampling.ignore_eos else source.randrange(95)
    biased = [token for token, bias in sampling.logit_bias if bias >= 100]
    return (biased[0] if biased else token), -0.125 * (1 + source.randrange(8))


def alternatives(token: int, logprob: float, count: int) -> tuple[tuple[int, float], ...]:
    """Return the sampled token and less probable ones."""
    return tuple(((token + step) % 95, logprob - step) for step in range(count))


def _held_back(text: str, stops: Sequence[str]) -> int:
    lengths = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    return max(lengths, default=0)
