"""Prompts in responses: `echo`, and the log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from msgspec import structs

from clotho.serving.openai_responses import (
    LOWEST,
    AssistantMessage,
    ChatChoice,
    Choice,
    Chunk,
    CompletionChoice,
    CompletionLogprobs,
    PromptPosition,
    PromptToken,
    ResponseBody,
    ResponseBuilder,
)
from clotho.serving.services import Tokenizer
from protocols.sampling import Completion, PromptLogprobs


def prompt_positions(
    tokens: Sequence[int], scored: PromptLogprobs, tokenizer: Tokenizer, *, top: int
) -> list[PromptPosition | None]:
    """Return one entry per token of a prompt, with `top` alternatives; null for the first, which has no context."""
    positions: list[PromptPosition | None] = [None]
    for token, logprob, alternatives in zip(tokens[1:], scored.logprobs, scored.top_logprobs, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(alternatives[:top], 1)}
        values = {token: logprob} | {other: value for other, value in alternatives[:top] if other != token}
        positions.append(
            {
                other: PromptToken(
                    logprob=max(value, LOWEST), rank=ranks.get(other), decoded_token=tokenizer.token_text(other)
                )
                for other, value in values.items()
            }
        )
    return positions


class PromptedBuilder(ResponseBuilder):
    """A builder of bodies that contain prompts or log-probabilities of prompts.

    scored: log-probabilities of each prompt; empty if the request needs none.
    """

    scored: Sequence[PromptLogprobs] = ()

    def whole(self, results: Sequence[Sequence[Completion]]) -> ResponseBody:
        """Return the whole response; the log-probabilities of a conversation are at its top level."""
        body = super().whole(results)
        if self.request.prompt_logprobs is None or not isinstance(body.choices[0], ChatChoice):
            return body
        return structs.replace(body, prompt_logprobs=self._positions(0))

    def _choice(self, chunk: Chunk, *, whole: bool) -> Choice:
        choice, prompt = super()._choice(chunk, whole=whole), chunk.index // self.request.n
        if isinstance(choice, ChatChoice):
            return self._echoed_message(choice, whole=whole) if self.request.echo and chunk.first else choice
        if self.request.prompt_logprobs is not None:
            choice = structs.replace(choice, prompt_logprobs=self._positions(prompt))
        return self._echoed_text(choice, prompt) if self.request.echo and chunk.first else choice

    def _positions(self, prompt: int) -> list[PromptPosition | None]:
        tokens, top = self.request.prompts[prompt], self.request.prompt_logprobs or 0
        return prompt_positions(tokens, self.scored[prompt], self.tokenizer, top=top)

    def _echoed_message(self, choice: ChatChoice, *, whole: bool) -> ChatChoice:
        message = choice.message if whole else choice.delta
        assert isinstance(message, AssistantMessage)
        content = message.content if isinstance(message.content, str) else ""
        echoed = structs.replace(message, content=f"{self.request.echo[0]}{content}")
        return structs.replace(choice, **{"message" if whole else "delta": echoed})

    def _echoed_text(self, choice: CompletionChoice, prompt: int) -> CompletionChoice:
        logprobs = choice.logprobs
        if logprobs is not None:
            logprobs = _joined(self._prompt_logprobs(prompt), logprobs)
        return structs.replace(choice, text=f"{self.request.echo[prompt]}{choice.text}", logprobs=logprobs)

    def _prompt_logprobs(self, prompt: int) -> CompletionLogprobs:
        tokens, scored, count = self.request.prompts[prompt], self.scored[prompt], self.request.top_logprobs
        name = self.tokenizer.token_text
        texts = [name(token) for token in tokens]
        values = [max(value, LOWEST) for value in scored.logprobs]
        top: list[dict[str, float] | None] = [
            {name(other): max(value, LOWEST) for other, value in alternatives[:count]} | {text: own}
            for alternatives, text, own in zip(scored.top_logprobs, texts[1:], values, strict=True)
        ]
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[None, *values],
            top_logprobs=[None, *top],
            text_offset=list(accumulate((len(text) for text in texts[:-1]), initial=0)),
        )


def _joined(prompt: CompletionLogprobs, completion: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of a prompt and of what follows it."""
    length = prompt.text_offset[-1] + len(prompt.tokens[-1])
    return CompletionLogprobs(
        tokens=[*prompt.tokens, *completion.tokens],
        token_logprobs=[*prompt.token_logprobs, *completion.token_logprobs],
        top_logprobs=[*prompt.top_logprobs, *completion.top_logprobs],
        text_offset=[*prompt.text_offset, *(length + offset for offset in completion.text_offset)],
    )
