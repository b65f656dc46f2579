"""Divides the text of a completion among its tokens: the texts of the tokens, joined, are the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clotho.inference.stop_strings import MAX_CHARACTER_TOKENS, REPLACEMENT, IncrementalDetokenizer, TokenDecoder


class TokenTexts:
    """Divides texts among tokens. Keeps the text of every token that it has seen, at most the vocabulary.

    Bytes of a character that several tokens share belong to the last one. Special tokens have no text, nor has what
    follows the text: a stop string, the end token. If `text` is not the decoded tokens or their beginning, the result
    is the decoded tokens.
    """

    def __init__(self, decoder: TokenDecoder, anchor: int) -> None:
        """anchor: an ordinary token with text. Decoders treat the first token of a text differently."""
        self._decoder, self._anchor = decoder, anchor
        self._anchor_text = decoder.decode([anchor])
        self._known: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int], text: str) -> list[str]:
        """Return one text per token of a completion with this text."""
        texts = list(self._one_by_one(tokens))
        if not "".join(texts).startswith(text):
            texts = self._in_context(tokens)
        return _until(texts, text)

    def _one_by_one(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield the text of each token as if it followed the anchor. Tokens of one character are decoded together."""
        run: list[int] = []
        for place, token in enumerate(tokens):
            first = place == len(run)  # the run began with the first token
            text = self._of_token(token) if not run and place else self._of([*run, token], first=first)
            if text.endswith(REPLACEMENT) and len(run) + 1 < MAX_CHARACTER_TOKENS and place + 1 < len(tokens):
                run.append(token)
                yield ""
            else:
                run.clear()
                yield text

    def _of_token(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._of([token], first=False)
        return text

    def _of(self, tokens: Sequence[int], *, first: bool) -> str:
        """Return the text of tokens. first: they begin the completion."""
        if first:
            return self._decoder.decode(tokens)
        return self._decoder.decode([self._anchor, *tokens])[len(self._anchor_text) :]

    def _in_context(self, tokens: Sequence[int]) -> list[str]:
        """Decode each token after those before it, for decoders that join neighbouring tokens."""
        detokenizer = IncrementalDetokenizer(self._decoder)
        texts = [detokenizer.push(token) for token in tokens]
        return [*texts[:-1], texts[-1] + detokenizer.finish()] if texts else []


def _until(texts: list[str], text: str) -> list[str]:
    """Return the texts of the tokens up to the end of `text`, if they begin with it."""
    joined = "".join(texts)
    if len(joined) == len(text) or not joined.startswith(text):
        return texts
    left = len(text)
    for place, one in enumerate(texts):
        if len(one) > left:
            texts[place] = one[:left]
        left -= len(texts[place])
    return texts
