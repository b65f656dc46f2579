"""The answers of Tinker's Rest client: training runs, checkpoints and sessions.

A client sees what belongs to its API key; without keys, everything.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, TypeVar

import anyio
from msgspec.structs import replace

from attachments.tinker.bodies import Answer, Limit, OfCheckpoint, Offset
from attachments.tinker.service import MIB, TinkerService
from attachments.tinker.store import SCHEME, TYPES, SavedCheckpoint, SavedRun, expiry
from clotho.serving.auth import Client
from protocols.errors import visible

T = TypeVar("T")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(found: Sequence[T], offset: int, limit: int) -> tuple[Sequence[T], Mapping[str, int]]:
    """Return the part of a list that a request asks for, and where it is."""
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>Tenants</title><style>body{{font:14px system-ui;margin:2em}}td,th{{padding:.2em 1em;text-align:left}}</style>
<h1>Tenants</h1>
<p>Adapters in training hold {held:.1f} of {budget:.1f} MiB; {waiting} requests wait for the learner.</p>
<table>{rows}</table></html>"""
COLUMNS = ("client", "session", "SDK", "open requests", "samplers", "model", "rank", "steps", "MiB")


class TinkerRest:
    """What is saved on one server."""

    def __init__(self, service: TinkerService) -> None:
        self._service, self._sessions, self._store = service, service.sessions, service.store

    def runs(self, client: Client, offset: Offset = 0, limit: Limit = 20) -> Answer:
        """List training runs."""
        shown, cursor = _page(self._store.runs(client.owner), offset, limit)
        return {"training_runs": [self._run(run) for run in shown], "cursor": cursor}

    def run(self, run_id: str, client: Client) -> Answer:
        """Return a training run."""
        return self._run(self._store.run(run_id, client.owner))

    def _run(self, run: SavedRun) -> Answer:
        checkpoints = self._store.checkpoints(run.model_id)
        newest = {one.kind: self._checkpoint(one) for one in checkpoints}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": run.owner or "local",
            "lora_rank": run.lora.rank,
            "is_lora": True,
            "corrupted": False,
            "last_request_time": _iso(checkpoints[-1].created if checkpoints else run.created),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }

    def _checkpoint(self, one: SavedCheckpoint) -> Answer:
        return {
            "checkpoint_id": f"{one.kind}/{one.name}",
            "checkpoint_type": TYPES[one.kind],
            "time": _iso(one.created),
            "tinker_path": one.path,
            "size_bytes": sum(file.stat().st_size for file in self._store.place(one).iterdir()),
            "public": False,
            "user_metadata": one.user_metadata,
            "expires_at": _iso(one.expires) if one.expires else None,
        }

    def checkpoints_of_run(self, run_id: str, client: Client) -> Answer:
        """List the checkpoints of a run."""
        run = self._store.run(run_id, client.owner)
        return {"checkpoints": [self._checkpoint(one) for one in self._store.checkpoints(run.model_id)]}

    def checkpoints(self, client: Client, offset: Offset = 0, limit: Limit = 20) -> Answer:
        """List the checkpoints of all runs."""
        found = [one for run in self._store.runs(client.owner) for one in self._store.checkpoints(run.model_id)]
        shown, cursor = _page(found, offset, limit)
        return {"checkpoints": [self._checkpoint(one) for one in shown], "cursor": cursor}

    def _named(self, call: OfCheckpoint, client: Client) -> SavedCheckpoint:
        return self._store.find(f"{SCHEME}{call.run_id}/{call.kind}/{call.name}", client.owner)

    async def delete(self, call: OfCheckpoint, client: Client) -> Answer:
        """Delete a checkpoint."""
        place = self._store.place(self._named(call, client))
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(place))
        return {}

    def set_ttl(self, call: OfCheckpoint, client: Client) -> Answer:
        """Change how long a checkpoint is kept."""
        self._store.change(replace(self._named(call, client), expires=expiry(call.ttl_seconds)))
        return {}

    async def archive(self, call: OfCheckpoint, client: Client) -> tuple[str, bytes]:
        """Return the name and the content of the archive of a checkpoint."""
        found = self._named(call, client)
        return f"{found.name}.tar.gz", await anyio.to_thread.run_sync(lambda: self._store.archive(found))

    def weights_info(self, tinker_path: str, client: Client) -> Answer:
        """Return the shape of the adapter of a checkpoint."""
        run = self._store.run(self._store.find(tinker_path, client.owner).run, client.owner)
        names = ("train_unembed", "train_mlp", "train_attn")
        shape: dict[str, Any] = {name: getattr(run.lora, name) for name in names}
        return {"base_model": run.base_model, "is_lora": True, "lora_rank": run.lora.rank, **shape}

    async def copy_weights(self, source_path: str, client: Client) -> Answer:
        """Copy a checkpoint to a run of its own, which nobody trains."""
        source = self._store.find(source_path, client.owner)
        run = self._store.run(source.run, client.owner)
        target = replace(run, model_id=f"copy-{time.time_ns():x}:train:0", owner=client.owner, created=time.time())
        copied = await anyio.to_thread.run_sync(lambda: self._store.copy(source, target))
        return {"tinker_path": copied.path}

    def sessions(self, client: Client, offset: Offset = 0, limit: Limit = 20) -> Answer:
        """List the sessions that are open."""
        shown, _ = _page(self._sessions.open(client.owner), offset, limit)
        return {"sessions": [one.session_id for one in shown]}

    def session(self, session_id: str, client: Client) -> Answer:
        """Return what a session has made."""
        found = self._sessions.get(session_id, client)
        made = {"training_run_ids": list(found.models), "sampler_ids": found.samplers}
        return {**made, "user_metadata": found.fields.user_metadata, "display_name": found.fields.display_name}

    def tenants(self) -> str:
        """Return the page of all sessions and their models, which a browser loads again every five seconds."""
        rows: list[Sequence[object]] = []
        for one in self._sessions.open(""):
            shown = (one.name.rpartition("/")[0], one.session_id, one.fields.sdk_version, len(one.unfinished))
            models = [(m.model_id, m.lora.rank, m.steps, f"{m.bytes / MIB:.1f}") for m in one.models.values()]
            rows += [(*shown, len(one.samplers), *model) for model in models] or [(*shown, len(one.samplers))]
        lines = ["".join(f"<td>{escape(visible(str(cell), 80))}</td>" for cell in row) for row in rows]
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        return PAGE.format(
            held=self._service.model_bytes / MIB,
            budget=self._service.budget / MIB,
            waiting=self._service.queue.waiting,
            rows="".join(f"<tr>{line}</tr>" for line in (head, *lines)),
        )
