"""All errors that Clotho raises deliberately.

A message states what is wrong, where, and what to do. `exit_status` is the command's exit status: 2 for a mistake that
the user can correct (one line, no traceback), 1 for a run that failed.
"""

from __future__ import annotations


class ClothoError(Exception):
    """Base class."""

    exit_status: int = 1


class ProfileError(ClothoError, ValueError):
    """The profile or a flag is invalid. Names the file, the key and the allowed values."""

    exit_status = 2


class DatasetError(ClothoError, ValueError):
    """A dataset is missing, empty or malformed. Names the file and the line."""

    exit_status = 2


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


class DivergenceError(ClothoError, RuntimeError):
    """Too many consecutive updates were not finite. The last good checkpoint is kept."""


class CollapseError(ClothoError, RuntimeError):
    """The policy collapses or exploits its rewards, and the profile says to stop (`collapse_detection.on_collapse`)."""


class AdapterError(ClothoError, RuntimeError):
    """The adapter keeps its initial value although it is trained."""


class ActorError(ClothoError, RuntimeError):
    """An actor failed and is not restarted. Names the actor; its error is chained."""


class ExecutorStoppedError(ClothoError, RuntimeError):
    """Work was submitted to a compute thread that has stopped."""
