"""Who failed, and how to say it."""

from __future__ import annotations

from protocols.errors import ClothoError


def culprit(error: Exception) -> Exception:
    """Take the single error out of the groups in which task groups wrap it; a group of several stays one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def in_words(error: Exception) -> str:
    """Write an error for one line. Errors of ours are sentences; of others, the type is half of the message."""
    return str(error) if isinstance(error, ClothoError) else f"{type(error).__name__}: {error}"
