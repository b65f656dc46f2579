"""The routes of Tinker's Rest client: training runs, checkpoints and sessions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import TypeVar

import anyio
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from attachments.tinker import bodies
from attachments.tinker.routes import Routes, TinkerRoutes, answer
from attachments.tinker.store import SCHEME, TYPES, SavedCheckpoint, SavedRun, expiry
from clotho.serving.auth import client_of
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.parts import Handlers, ServerParts

T = TypeVar("T")

MOST_LISTED = 1000


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class RestRoutes(Routes):
    """The routes of one server. A client sees what belongs to its API key; without keys, everything."""

    def __init__(self, parts: ServerParts, training: Handlers) -> None:
        """training: the routes that hold the state of the API."""
        loaded = training.loaded
        assert isinstance(loaded, TinkerRoutes)
        super().__init__(parts, loaded.service)
        self._store = self.service.store

    async def runs(self, http: Request) -> Response:
        """Serve GET training_runs."""
        shown, cursor = _page(http, self._store.runs(client_of(http.scope).owner))
        return answer(bodies.RunList(training_runs=[self._run(run) for run in shown], cursor=cursor))

    async def run(self, http: Request) -> Response:
        """Serve GET training_runs/{id}."""
        return answer(self._run(self._store.run(http.path_params["run_id"], client_of(http.scope).owner)))

    def _run(self, run: SavedRun) -> bodies.RunInfo:
        checkpoints = self._store.checkpoints(run.model_id)
        newest = {kind: [one for one in checkpoints if one.kind == kind][-1:] for kind in TYPES}
        last = {kind: self._checkpoint(one[0]) if one else None for kind, one in newest.items()}
        return bodies.RunInfo(
            training_run_id=run.model_id,
            base_model=run.base_model,
            model_owner=run.owner or "local",
            lora_rank=run.lora.rank,
            last_request_time=_iso(checkpoints[-1].created if checkpoints else run.created),
            last_checkpoint=last["weights"],
            last_sampler_checkpoint=last["sampler_weights"],
            user_metadata=run.user_metadata,
        )

    def _checkpoint(self, one: SavedCheckpoint) -> bodies.CheckpointInfo:
        place = self._store.directory(one.run) / one.kind / one.name
        return bodies.CheckpointInfo(
            checkpoint_id=f"{one.kind}/{one.name}",
            checkpoint_type=TYPES[one.kind],
            time=_iso(one.created),
            tinker_path=one.path,
            size_bytes=self._store.size(place),
            user_metadata=one.user_metadata,
            expires_at=_iso(one.expires) if one.expires else None,
        )

    async def checkpoints_of_run(self, http: Request) -> Response:
        """Serve GET training_runs/{id}/checkpoints."""
        run = self._store.run(http.path_params["run_id"], client_of(http.scope).owner)
        found = [self._checkpoint(one) for one in self._store.checkpoints(run.model_id)]
        return answer(bodies.CheckpointList(checkpoints=found))

    async def checkpoints(self, http: Request) -> Response:
        """Serve GET checkpoints."""
        runs = self._store.runs(client_of(http.scope).owner)
        shown, cursor = _page(http, [one for run in runs for one in self._store.checkpoints(run.model_id)])
        return answer(bodies.CheckpointList(checkpoints=[self._checkpoint(one) for one in shown], cursor=cursor))

    def _named(self, http: Request) -> tuple[SavedCheckpoint, Path]:
        parts = http.path_params
        path = f"{SCHEME}{parts['run_id']}/{parts['kind']}/{parts['name']}"
        return self._store.find(path, client_of(http.scope).owner)

    async def delete(self, http: Request) -> Response:
        """Serve DELETE of a checkpoint."""
        _, place = self._named(http)
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(place))
        return answer(bodies.Empty())

    async def set_ttl(self, http: Request) -> Response:
        """Serve PUT of the life of a checkpoint."""
        call = await self.body(http, bodies.TtlCall)
        found, place = self._named(http)
        self._store.change(replace(found, expires=expiry(call.ttl_seconds)), place)
        return answer(bodies.Empty())

    async def archive(self, http: Request) -> Response:
        """Serve GET of a checkpoint's archive: a redirection to this server, which sends the file itself.

        SDK 0.34 reads the address from `location`; a client that sends `accept: application/gzip` gets the file.
        """
        found, place = self._named(http)
        if "gzip" in http.headers.get("accept", ""):
            content = await anyio.to_thread.run_sync(lambda: self._store.archive(place))
            headers = {"content-disposition": f'attachment; filename="{found.name}.tar.gz"'}
            return Response(content, media_type="application/gzip", headers=headers)
        until = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
        return Response(status_code=302, headers={"location": str(http.url), "expires": until})

    async def weights_info(self, http: Request) -> Response:
        """Serve POST weights_info."""
        call, owner = await self.body(http, bodies.WeightsPath), client_of(http.scope).owner
        run = self._store.run(self._store.find(call.tinker_path, owner)[0].run, owner)
        lora = run.lora
        return answer(
            bodies.WeightsInfo(
                base_model=run.base_model,
                lora_rank=lora.rank,
                train_unembed=lora.train_unembed,
                train_mlp=lora.train_mlp,
                train_attn=lora.train_attn,
            )
        )

    async def copy(self, http: Request) -> Response:
        """Serve POST copy_weights: to a run of its own, which nobody trains."""
        call, client = await self.body(http, bodies.CopyWeights), client_of(http.scope)
        source, _ = self._store.find(call.source_path, client.owner)
        run = self._store.run(source.run, client.owner)
        target = replace(run, model_id=f"copy-{time.time_ns():x}:train:0", owner=client.owner, created=time.time())
        copied = await anyio.to_thread.run_sync(lambda: self._store.copy(call.source_path, client.owner, target))
        return Response(f'{{"tinker_path":"{copied.path}"}}', media_type="application/json")

    async def sessions(self, http: Request) -> Response:
        """Serve GET sessions: those that are open."""
        shown, _ = _page(http, self.service.sessions.open(client_of(http.scope).owner))
        return answer(bodies.SessionList(sessions=[one.session_id for one in shown]))

    async def session(self, http: Request) -> Response:
        """Serve GET sessions/{id}."""
        found = self.service.sessions.get(http.path_params["session_id"], client_of(http.scope))
        return answer(
            bodies.SessionInfo(
                training_run_ids=list(found.models),
                sampler_ids=list(found.samplers),
                user_metadata=found.fields.user_metadata,
                display_name=found.fields.display_name,
            )
        )


def _page(http: Request, found: Sequence[T]) -> tuple[Sequence[T], bodies.Cursor]:
    """Return the part of a list that a request asks for. Raises ApiError."""
    numbers = []
    for name, usual in (("offset", 0), ("limit", 20)):
        text = http.query_params.get(name, str(usual))
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            raise invalid_field(name, "must be a number")
        numbers.append(int(text))
    offset, limit = numbers
    if limit > MOST_LISTED:
        raise ApiError(400, f"limit must be at most {MOST_LISTED}", param="limit")
    return found[offset : offset + limit], bodies.Cursor(offset=offset, limit=limit, total_count=len(found))
