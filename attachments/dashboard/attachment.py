"""What the page of a run shows besides its histories: a timeline, and the values of each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attachments.dashboard.sections import TOKEN_VALUES_MB
from clotho.storage.atomic_files import copy_file
from training_run.supervision.supervisor import temporary

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from clotho.settings.server import HttpServer
    from training_run.directory.run_directory import RunDirectory
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


TOKENS = "tokens"
"""Directory of per-token values, one file per step."""


COMMANDS: Mapping[str, str] = {"view": "attachments.dashboard.view"}
DIRECTORIES: Mapping[str, str] = {TOKENS: r"step-[0-9]{6,}\.safetensors"}


def loading_page(server: HttpServer) -> ASGIApp | None:
    """Return the page that is shown while the model is loaded; None without a dashboard."""
    if not server.dashboard:
        return None
    from attachments.dashboard.paths import page_app

    return page_app()


def rewind(directory: RunDirectory, step: int, place: Path | None) -> None:
    """Move the values of later steps to `place`, with a copy of the timeline; without a place, delete the values.

    The recorder of the timeline shortens it itself.
    """
    if place is not None:
        (place / TOKENS).mkdir(exist_ok=True)
        if directory.timeline.is_file():
            copy_file(directory.timeline, place / directory.timeline.name)
    from attachments.dashboard.token_values import token_files

    for number, path in token_files(directory.path / TOKENS).items():
        if number <= step:
            continue
        if place is None:
            path.unlink()
        else:
            path.rename(place / TOKENS / path.name)


async def prepare(plan: Plan) -> Attach | None:
    """Record the timeline, and let updates return the values of their tokens."""
    limit = TOKEN_VALUES_MB.of(plan.profile.monitor)
    plan.token_values |= limit > 0

    async def attach(run: RunContext) -> None:
        from attachments.dashboard.timeline import timeline_recorder

        run.attached.recorders.append(lambda wired: temporary(timeline_recorder(run, wired.facts, wired.queues)))
        if limit:
            from attachments.dashboard.token_values import TokenTexts, TokenValueWriter

            tokenizer = run.policy.tokenizer
            texts = TokenTexts(tokenizer, tokenizer.encode("a", add_special_tokens=False)[-1])
            values = TokenValueWriter(run.directory.path / TOKENS, limit_bytes=limit << 20, texts=texts)
            run.attached.observers.append(values)

    return attach
