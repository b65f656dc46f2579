"""All errors that Clotho raises deliberately.

A message states what is wrong, where, and what to do. `exit_status` is the command's exit status: 2 for a mistake that
the user can correct (one line, no traceback), 1 for a run that failed.

Messages quote text from outside: keys, paths, records, names, texts of exceptions. Every outlet (terminal, event log on
the terminal, HTTP error body) passes its text through `visible`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Literal

INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that `visible` escapes: control and format characters, surrogates, unassigned, line separators."""
JOINER = "\u200d"
"""The joiner inside emoji sequences, which is not escaped."""


def visible(text: str, limit: int, *, keep_end: int = 0) -> str:
    r"""Return untrusted text as one line of at most `limit` characters.

    Control characters, terminal escape sequences, line breaks, changes of writing direction and lone surrogates become
    Python escapes (`\x1b`, `\n`, `\u202e`). An ellipsis replaces what exceeds the limit: the end, or the text before
    the last `keep_end` characters. The function is idempotent.
    """
    shown = _escaped(text[:limit])
    if len(text) <= limit and len(shown) <= limit:
        return shown
    end = _escaped(text[-keep_end:])[-keep_end:] if keep_end else ""
    return f"{shown[: max(0, limit - 1 - len(end))]}…{end}"


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or a substitute if the class of the error fails to produce it."""
    try:
        return str(error)
    except Exception:
        return "(str() of the exception failed)"


def as_exception(error: BaseException) -> Exception:
    """Return an error of another thread in a form that a task may raise.

    SystemExit, KeyboardInterrupt and panics of native libraries would end the event loop; RuntimeError replaces them.
    """
    if isinstance(error, Exception):
        return error
    replacement = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
    replacement.__cause__ = error
    return replacement


def _escaped(text: str) -> str:
    return escape_invisible(text, lambda character: character.encode("unicode_escape").decode("ascii"))


def escape_invisible(text: str, escape: Callable[[str], str]) -> str:
    """Replace control and format characters, except the joiner of emoji sequences, by `escape(character)`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        escape(character) if unicodedata.category(character) in INVISIBLE and character != JOINER else character
        for character in text
    )


@contextmanager
def disk_errors_as(kind: Callable[[str], Exception], what: str) -> Iterator[None]:
    """Raise an OSError of the block as an error of this kind with the message `WHAT: REASON`; a ClothoError stays."""
    try:
        yield
    except ClothoError:
        raise
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


class Interrupted(BaseException):
    """Raised in the thread of an abandoned call. Takes effect at the next Python bytecode, not inside a C call."""


class ClothoError(Exception):
    """Base class."""

    exit_status: int = 1


class ProfileError(ClothoError, ValueError):
    """The profile or a flag is invalid. Names the file, the key and the allowed values."""

    exit_status = 2


class DatasetError(ClothoError, ValueError):
    """A dataset is missing, empty or malformed. Names the file and the line."""

    exit_status = 2


class RecordsError(DatasetError):
    """Records of a dataset are malformed. invalid: how many of `records`. The message is about the first one."""

    def __init__(self, message: str, *, invalid: int, records: int) -> None:
        """message: about the first malformed record."""
        more = f"; {invalid} of {records} records are malformed" if invalid > 1 else ""
        super().__init__(f"{message}{more}")
        self.first, self.invalid, self.records = message, invalid, records


class ModelError(ClothoError, ValueError):
    """A model cannot be found, read or trained with these settings."""

    exit_status = 2


class RunDirectoryError(ClothoError, OSError):
    """A run directory contains another run, is in use, or cannot be written."""

    exit_status = 2


class CheckpointError(ClothoError, ValueError):
    """A checkpoint is damaged, or was written with another configuration."""

    exit_status = 2


class ServerError(ClothoError, OSError):
    """The HTTP server cannot start: the port is in use, or the host is not permitted."""

    exit_status = 2


class RequestError(ClothoError, ValueError):
    """The engine refuses a sampling request. `param` names the invalid field."""

    def __init__(self, message: str, *, param: str) -> None:
        """param: name of the invalid field."""
        super().__init__(message)
        self.param = param


class GenerationError(ClothoError, RuntimeError):
    """The engine accepted a valid sampling request and could not finish it."""


class ParityError(ClothoError, RuntimeError):
    """Sampler and learner compute different log-probabilities for the same tokens."""


class RemoteError(ClothoError, RuntimeError):
    """A server that the run needs cannot be used: none of the inference servers, or the Atropos API server."""


class RankError(ClothoError, RuntimeError):
    """Another rank of a data-parallel learner failed."""


class DivergenceError(ClothoError, RuntimeError):
    """Too many consecutive updates were not finite. The last good checkpoint is kept."""


class CollapseError(ClothoError, RuntimeError):
    """The policy collapses or exploits its rewards, and the profile says to stop (`collapse_detection`)."""


class AdapterError(ClothoError, RuntimeError):
    """The adapter keeps its initial value although it is trained."""


AdapterRefusal = Literal["missing", "invalid", "exists", "unknown", "full", "disabled", "forbidden"]
"""Why an adapter is refused: its files do not exist, do not fit, the name is taken or unknown, no space, no root, or
the adapter belongs to another client."""


class AdapterRequestError(ClothoError, ValueError):
    """An adapter cannot be loaded or unloaded; nothing has changed."""

    exit_status = 2

    def __init__(self, message: str, *, reason: AdapterRefusal) -> None:
        """reason: kind of the refusal."""
        super().__init__(message)
        self.reason: AdapterRefusal = reason


ArtifactRefusal = Literal["exists", "unreadable", "inexpressible", "base", "rounding", "unwritable"]
"""Why an artifact is refused: the path exists, the source is none, the format cannot express it, the base model is
unknown or does not fit, the quantization loses the change, or the disk refuses."""


class ArtifactError(ClothoError, ValueError):
    """An adapter or a model cannot be converted, merged or written; nothing has been written."""

    exit_status = 2

    def __init__(self, message: str, *, reason: ArtifactRefusal) -> None:
        """reason: kind of the refusal."""
        super().__init__(message)
        self.reason: ArtifactRefusal = reason


class ActorError(ClothoError, RuntimeError):
    """An actor failed and is not restarted. Names the actor; its error is chained."""


class ExecutorStoppedError(ClothoError, RuntimeError):
    """Work was submitted to a compute thread that has stopped."""


CUTOFF, LONGEST = 0.6, 100
"""Minimum similarity of a suggestion, and number of characters that are compared."""


def similarity(left: str, right: str) -> float:
    """Similarity of two names, from 0 to 1. Case, `-` and `_` are ignored."""
    plain_left, plain_right = (name[:LONGEST].lower().replace("-", "_") for name in (left, right))
    return SequenceMatcher(None, plain_left, plain_right).ratio()


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = CUTOFF) -> str | None:
    """The candidate that is most similar to `word`, or None if none reaches `cutoff`."""
    scored = [(similarity(word, candidate), candidate) for candidate in candidates]
    best, candidate = max(scored, default=(-1.0, ""))
    return candidate if best >= cutoff else None


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = CUTOFF) -> str:
    """The end of an error message: `; did you mean X?`; empty if no candidate is similar."""
    guess = nearest(word, candidates, cutoff=cutoff)
    return "" if guess is None else f"; did you mean {guess}?"
