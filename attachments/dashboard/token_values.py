"""Per-token values of completions, in one file per step: tokens/step-000007.safetensors of the run directory.

One row per token, in order of group, completion and position. C counts the completions of a file, N its tokens:

    key                 type, length   content
    completion_group    int64, C       number of the group
    completion_index    int32, C       index of the completion in its group
    completion_start    int64, C + 1   the tokens of completion c are rows completion_start[c] to completion_start[c+1]
    token               int32, N       the token
    text_start          int64, N + 1   the text of row n is text[text_start[n]:text_start[n + 1]]
    text                uint8          texts of all tokens in UTF-8
    version             int32, N       policy version that sampled the token
    sampled_logprob     float32, N     log-probability at sampling, in nats
    learner_logprob     float32, N     log-probability at the first gradient that used the token, in nats
    ratio               float32, N     importance ratio exp(learner_logprob - sampled_logprob), at most 20 nats
    advantage           float32, N     the advantage
    cut                 uint8, N       what limits the gradient of the token: see `protocols.step.Cut`
    gradient_share      float32, N     |d loss / d logp| divided by its sum over the tokens of the update

NaN stands for a value that does not exist: `advantage` of discarded groups; `learner_logprob` and `ratio` of tokens
that no gradient used; `sampled_logprob` of tokens that the policy did not sample. Their `gradient_share` is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from clotho.inference.stop_strings import MAX_CHARACTER_TOKENS, REPLACEMENT, IncrementalDetokenizer, TokenDecoder
from clotho.storage.atomic_files import make_directory, replace_file
from protocols.errors import RunDirectoryError
from protocols.sampling import Completion
from protocols.step import Cut, GroupsEnded, StepReport, TokenValues
from training_run.supervision.hooks import ReportObserver

FORMAT = "1"
MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of an importance ratio in nats, as in the loss."""
TOKEN_FILE = re.compile(r"step-([0-9]{6,})\.safetensors")
DivideText = Callable[[Sequence[int], str], Sequence[str]]
"""Divides the text of a completion among its tokens: texts(tokens, text), one text per token."""


class CompletionTokens(Struct, frozen=True, kw_only=True):
    """The tokens of one completion with their values, as the module describes; None stands for NaN."""

    tokens: tuple[int, ...]
    text: tuple[str, ...]
    version: tuple[int, ...]
    sampled_logprob: tuple[float | None, ...]
    learner_logprob: tuple[float | None, ...]
    ratio: tuple[float | None, ...]
    advantage: tuple[float | None, ...]
    cut: tuple[int, ...]
    gradient_share: tuple[float, ...]


def token_file(directory: Path, step: int) -> Path:
    """Return the path of the file of a step."""
    return directory / f"step-{step:06d}.safetensors"


def token_files(directory: Path) -> dict[int, Path]:
    """Return the files of a directory by step, in ascending order; empty if the directory does not exist."""
    entries = directory.iterdir() if directory.is_dir() else ()
    found = ((TOKEN_FILE.fullmatch(entry.name), entry) for entry in entries)
    return dict(sorted((int(match[1]), entry) for match, entry in found if match))


class _Rows(NamedTuple):
    """The rows of one completion. text: of all tokens. text_bytes_T: length of each token's text in UTF-8."""

    group: int
    completion: int
    token: NDArray[np.int32]
    text: bytes
    text_bytes_T: NDArray[np.int64]
    version: NDArray[np.int32]
    sampled_logprob: NDArray[np.float32]
    learner_logprob: NDArray[np.float32]
    ratio: NDArray[np.float32]
    advantage: NDArray[np.float32]
    cut: NDArray[np.uint8]
    gradient_share: NDArray[np.float32]

    @property
    def size(self) -> int:
        """Number of bytes in a file."""
        return len(self.token) * ROW_BYTES + len(self.text) + COMPLETION_BYTES


PER_TOKEN = {
    "token": np.int32, "version": np.int32, "sampled_logprob": np.float32, "learner_logprob": np.float32,
    "ratio": np.float32, "advantage": np.float32, "cut": np.uint8, "gradient_share": np.float32,
}  # fmt: skip
"""Arrays of length N, with their types."""
ROW_BYTES = sum(np.dtype(kind).itemsize for kind in PER_TOKEN.values()) + 8
COMPLETION_BYTES = 8 + 4 + 8
HEADER_BYTES = 2048


class TokenValueWriter(ReportObserver):
    """Writes the values of the groups that end with a step, and deletes the oldest files above a limit.

    A step writes the groups that ended before it too. If they exceed the limit, the first ones are dropped.
    """

    def __init__(self, directory: Path, *, limit_bytes: int, texts: DivideText) -> None:
        """directory: created with the first file. limit_bytes: limit on the sum of all files."""
        self.path, self.name = directory, directory.name
        self._limit, self._texts = limit_bytes, texts
        self._reports: list[StepReport | GroupsEnded] = []
        self._sizes: dict[Path, int] | None = None  # oldest first; read once, because a long run has many files

    def step(self, report: StepReport, line: Mapping[str, Any]) -> None:
        """Take the groups of a step into account."""
        self._reports.append(report)

    def groups(self, report: GroupsEnded) -> None:
        """Take groups into account that ended between two batches; they have the step of the next batch."""
        self._reports.append(report)

    def write(self) -> None:
        """Write the file of the step. Raises OSError if the disk refuses; its values are lost."""
        reports, self._reports = self._reports, []
        rows = self._last([row for report in reports for row in _rows(report, self._texts)])
        if not rows:
            return
        content, path = _encoded(rows, reports[-1].step), token_file(self.path, reports[-1].step)
        make_directory(self.path)
        if self._sizes is None:
            self._sizes = {file: file.stat().st_size for file in token_files(self.path).values()}
            self._total = sum(self._sizes.values())
        replace_file(path, [content])
        self._total += len(content) - self._sizes.pop(path, 0)
        self._sizes[path] = len(content)
        while self._total > self._limit and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            self._total -= self._sizes.pop(oldest)

    def _last(self, rows: Sequence[_Rows]) -> Sequence[_Rows]:
        """Return the last groups that fit into the limit."""
        room, first = self._limit - HEADER_BYTES, len(rows)
        while first and rows[first - 1].size <= room:
            first -= 1
            room -= rows[first].size
        incomplete = rows[first - 1].group if first else None
        return [row for row in rows[first:] if row.group != incomplete]


def _rows(report: StepReport | GroupsEnded, texts: DivideText) -> Iterator[_Rows]:
    """Yield the rows of every completion of a report, groups that were trained on first."""
    for trained in report.trained if isinstance(report, StepReport) else ():
        group = trained.scored.group
        completions = group.completions if trained.tokens else ()  # a custom learner gives no values
        for index, (completion, values) in enumerate(zip(completions, trained.tokens, strict=True)):
            yield _completion_rows(group.prompt.group_id, index, completion, values, texts)
    for discarded in report.discarded:
        for index, completion in enumerate(discarded.completions):
            yield _completion_rows(discarded.prompt.group_id, index, completion, None, texts)


def _completion_rows(
    group: int, index: int, completion: Completion, values: TokenValues | None, texts: DivideText
) -> _Rows:
    T = len(completion.tokens)
    pieces = texts(completion.tokens, completion.text)
    text = "".join(pieces)
    lengths = map(len, pieces) if text.isascii() else (len(_utf8(piece)) for piece in pieces)
    sampled_T = np.asarray(completion.logprobs, dtype=np.float32)
    if completion.sampled:
        sampled_T = np.where(np.asarray(completion.sampled, dtype=bool), sampled_T, np.float32(np.nan))
    missing_T = np.full(T, np.nan, dtype=np.float32)
    learner_T = missing_T if values is None else np.frombuffer(values.learner_logprob, dtype="<f4")
    return _Rows(
        group=group,
        completion=index,
        token=np.asarray(completion.tokens, dtype=np.int32),
        text=_utf8(text),
        text_bytes_T=np.fromiter(lengths, dtype=np.int64, count=T),
        version=np.asarray(completion.versions, dtype=np.int32),
        sampled_logprob=sampled_T,
        learner_logprob=learner_T,
        ratio=np.exp(np.clip(learner_T - sampled_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)),
        advantage=missing_T if values is None else np.frombuffer(values.advantage, dtype="<f4"),
        cut=np.full(T, Cut.NOT_TRAINED, np.uint8) if values is None else np.frombuffer(values.cut, dtype="u1"),
        gradient_share=(
            np.zeros(T, np.float32) if values is None else np.frombuffer(values.gradient_share, dtype="<f4")
        ),
    )


def _utf8(text: str) -> bytes:
    """Return the text in UTF-8; a lone surrogate becomes a question mark."""
    return text.encode(errors="replace")


def _encoded(rows: Sequence[_Rows], step: int) -> bytes:
    """Return the content of the file of a step."""
    arrays: dict[str, NDArray[Any]] = {
        "completion_group": np.array([row.group for row in rows], dtype=np.int64),
        "completion_index": np.array([row.completion for row in rows], dtype=np.int32),
        "completion_start": _starts(np.array([len(row.token) for row in rows], dtype=np.int64)),
        "text_start": _starts(np.concatenate([row.text_bytes_T for row in rows])),
        "text": np.frombuffer(b"".join(row.text for row in rows), dtype=np.uint8),
    }
    for name, kind in PER_TOKEN.items():
        arrays[name] = np.concatenate([getattr(row, name) for row in rows]).astype(kind, copy=False)
    return save(arrays, metadata={"step": str(step), "format": FORMAT})


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def read_group(run: Path, step: int, group_id: int) -> tuple[CompletionTokens | None, ...]:
    """Return the completions of a group that ended with a step; None for a completion that the file does not contain.

    run: the run directory. step: that of the group's line in rollouts.jsonl. Raises RunDirectoryError, which says why,
    if the run directory has no values of the group. Thread-safe; does not use MLX.
    """
    directory = run / "tokens"
    path = token_file(directory, step)
    if not path.is_file():
        raise RunDirectoryError(_reason(directory, step))
    found = _read(path, group_id)
    if not found:
        raise RunDirectoryError(
            f"the per-token values of step {step} exceeded monitor.token_values_mb, and those of group {group_id} were "
            "dropped: set a larger limit for the next run"
        )
    return tuple(found.get(index) for index in range(max(found) + 1))


def _reason(directory: Path, step: int) -> str:
    """Return why there is no file of a step."""
    steps = list(token_files(directory))
    if not steps:
        return "the run has no per-token values: monitor.token_values_mb was 0, or no group has ended yet"
    if step < steps[0]:
        return (
            f"the per-token values of step {step} were deleted, because later steps reached the limit "
            f"monitor.token_values_mb; the oldest step with values is {steps[0]}"
        )
    return f"the run has no per-token values of step {step}: they were switched off then, or could not be written"


def _read(path: Path, group_id: int) -> dict[int, CompletionTokens]:
    """Return the completions of a group by index."""
    if path.is_symlink() or path.parent.is_symlink():
        raise RunDirectoryError(f"{path} is a link, which is not followed")
    try:
        with safe_open(path, framework="np") as file:
            group_C, index_C = file.get_tensor("completion_group"), file.get_tensor("completion_index")
            start_C = file.get_tensor("completion_start")
            return {
                int(index_C[c]): _completion(file, int(start_C[c]), int(start_C[c + 1]))
                for c in np.flatnonzero(group_C == group_id)
            }
    except (SafetensorError, OSError, ValueError, IndexError, TypeError, OverflowError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error


def _slice(file: Any, name: str, start: int, end: int) -> NDArray[Any]:
    """Return a part of an array. The library refuses empty parts."""
    return file.get_slice(name)[start:end] if start < end else np.empty(0, np.uint8)


def _completion(file: Any, start: int, end: int) -> CompletionTokens:
    """Return the completion in the rows from `start` to `end`."""
    rows = {name: _slice(file, name, start, end) for name in PER_TOKEN}
    text_start = _slice(file, "text_start", start, end + 1)
    text = _slice(file, "text", int(text_start[0]), int(text_start[-1])).tobytes()
    places = (text_start - text_start[0]).tolist()
    values = {
        name: tuple(None if isnan(value) else value for value in rows[name].tolist())
        for name in ("sampled_logprob", "learner_logprob", "ratio", "advantage")
    }
    return CompletionTokens(
        tokens=tuple(rows["token"].tolist()),
        text=tuple(text[a:b].decode() for a, b in pairwise(places)),
        version=tuple(rows["version"].tolist()),
        cut=tuple(rows["cut"].tolist()),
        gradient_share=tuple(rows["gradient_share"].tolist()),
        **values,
    )


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
