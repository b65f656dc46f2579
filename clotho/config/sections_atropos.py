"""Sections of a profile that say which environments the groups come from, by way of an Atropos API server.

A section's docstring has one line per key (`key: text`, or `key, key: text`); `--help` and `docs/configuration.md`
are generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import PositiveFloat


class AtroposSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[atropos] Groups from reinforcement-learning environments; docs/atropos.md shows each way.

    enabled: learn from what environments send, not from `data.train`; held-out problems are measured as ever.
    url: of an API server that runs already; empty = start one, and the `[[environments]]`, with `python`.
    python: an interpreter that has atroposlib.
    mock: no atroposlib: a stand-in makes the groups from `data.train` and `[[rewards]]`, asking the HTTP API.
    reset: clear what a server that runs already holds from another trainer; false = go on with it, if it fits.
    missing_logprobs: of tokens that neither the group nor the engine's memory has one for: `recompute` it with the
        weights that serve, or `refuse` the group.
    max_tokens: of a sequence, all its turns together, or less where the model's context is shorter; the memory of an
        update is reckoned for it, and longer ones are refused.
    poll_seconds: the longest pause between two looks at the server.
    patience_seconds: so long without a group is reported, with whom the server waits for.
    """

    enabled: bool = False
    url: Annotated[str, Meta(pattern=r"^(https?://[^\s/]+\S*)?$", description="http://HOST:PORT")] = ""
    python: str = ""
    mock: bool = False
    reset: bool = True
    missing_logprobs: Literal["recompute", "refuse"] = "refuse"
    max_tokens: Annotated[int, Meta(ge=2)] = 2048
    poll_seconds: Annotated[float, Meta(ge=0.05, le=60.0)] = 1.0
    patience_seconds: PositiveFloat = 60.0


class EnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[environments]] A process that runs one Atropos environment, started and watched over with the run.

    name: in logs, metrics and the books.
    script: Python file whose `serve` command runs it; paths as for `data.train`.
    weight: share of every batch, as far as its groups suffice, beside the weights of the other environments.
    group_size: completions per prompt; unless set, `sampling.group_size`.
    min_batch_allocation: this share of every batch, as far as its groups suffice; unless set, that of its weight.
    options: further flags of the script, `--env.KEY VALUE` each; a key with a dot is the whole name of the flag.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$", description="letters, digits, - and _, at most 32")]
    script: Annotated[str, Meta(min_length=1)]
    weight: PositiveFloat = 1.0
    group_size: Annotated[int, Meta(ge=2, le=4096)] | None = None
    min_batch_allocation: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    options: dict[str, Any] = {}
