"""Everything that Clotho raises on purpose.

A message says what is wrong, where, and what to do. `exit_status` is what the command line ends with:
2 for a mistake of the person at the keyboard (one line, no traceback), 1 for a run that failed.
"""

from __future__ import annotations


class ClothoError(Exception):
    """Root of the tree."""

    exit_status: int = 1


class ProfileError(ClothoError, ValueError):
    """The profile, or a flag, cannot be used as written. Names the file, the key and what is allowed."""

    exit_status = 2


class DatasetError(ClothoError, ValueError):
    """A dataset is missing, empty or malformed. Names the file and the line."""

    exit_status = 2


class ModelError(ClothoError, ValueError):
    """A model cannot be found, read or trained as asked."""

    exit_status = 2


class RunDirectoryError(ClothoError, OSError):
    """A run directory holds another run, is in use, or cannot be written."""

    exit_status = 2


class CheckpointError(ClothoError, ValueError):
    """A checkpoint is damaged, or belongs to another configuration."""

    exit_status = 2


class GatewayError(ClothoError, OSError):
    """The HTTP server cannot start: the port is taken, the host is not permitted."""

    exit_status = 2


class RequestError(ClothoError, ValueError):
    """A sampling request that the engine refuses. `param` names the offending field."""

    def __init__(self, message: str, *, param: str) -> None:
        """Keep the field's name beside the message."""
        super().__init__(message)
        self.param = param


class GenerationError(ClothoError, RuntimeError):
    """The engine accepted a sampling request and could not finish it; nothing is wrong with the request."""


class ParityError(ClothoError, RuntimeError):
    """Sampler and learner disagree about the probability of the same tokens: what is served is not what is trained."""


class DivergenceError(ClothoError, RuntimeError):
    """Too many updates in a row were not finite; the last good checkpoint stands."""


class CollapseError(ClothoError, RuntimeError):
    """The policy collapses, or cheats its rewards, and the profile says to stop (`collapse_detection.on_collapse`)."""


class CompilationError(ClothoError, RuntimeError):
    """A compiled computation differs from the uncompiled one: it cannot be trusted to train."""


class AdapterError(ClothoError, RuntimeError):
    """An adapter stays at its start although it is trained: nothing that is learned reaches what is served."""


class ActorError(ClothoError, RuntimeError):
    """An actor failed beyond what its supervisor forgives. Names the actor; the cause is chained."""


class ExecutorStoppedError(ClothoError, RuntimeError):
    """Work was handed to a compute thread that has ended."""
