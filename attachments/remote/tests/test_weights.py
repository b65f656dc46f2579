"""Weights by path: the server reads a file of a directory that both see, and verifies it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from attachments.remote.messages import FILE_HEADER, FINGERPRINT_HEADER, STEP_HEADER, VERSION_HEADER
from attachments.remote.server import RemoteFailure
from attachments.remote.tests.inference_server import InferenceServer, group
from attachments.remote.weights import OverHttp, SharedDirectory, Weights
from clotho.storage.tensors import named_arrays, tensor_bytes
from protocols.errors import RemoteError
from protocols.step import WeightsReady


def moved(server: InferenceServer, version: int) -> Weights:
    """Return other weights than the served ones."""
    parameters, digest = server.moved(0.1 * version)
    return Weights(ready=WeightsReady(version=version, step=version, fingerprint=digest), parameters=parameters)


async def test_weights_by_path_are_served_and_only_the_newest_file_stays(tmp_path: Path) -> None:
    """Version and fingerprint are those of the run, and the server samples with the weights."""
    shared = tmp_path / "shared"
    with ExitStack() as stack:
        server = InferenceServer(stack, tmp_path / "server", weights_root=str(shared))
        client = server.client(delivery=SharedDirectory(shared, "run"))
        for version in (1, 2):
            weights = moved(server, version)
            served = await client.push(weights)
            assert (served.version, served.fingerprint) == (version, weights.ready.fingerprint)
            assert server.policy.fingerprint == weights.ready.fingerprint
            assert (await client.sample(group())).fingerprints == {version: weights.ready.fingerprint}
            assert [path.name for path in shared.iterdir()] == [f"run-{version}.safetensors"]


async def test_both_ways_have_the_same_content(tmp_path: Path) -> None:
    """The bytes of the request, and those of the file that it names."""
    with ExitStack() as stack:
        weights = moved(InferenceServer(stack, tmp_path / "server"), 1)
        body, _ = await OverHttp().body(weights)
        empty, headers = await SharedDirectory(tmp_path, "run").body(weights)
    assert empty == b""
    assert (tmp_path / headers[FILE_HEADER]).read_bytes() == body


async def test_a_directory_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    """The run ends, because no server could get weights."""
    (tmp_path / "file").write_text("")
    with ExitStack() as stack:
        weights = moved(InferenceServer(stack, tmp_path / "server"), 1)
        with pytest.raises(RemoteError, match=r"generator\.weights\.directory"):
            await SharedDirectory(tmp_path / "file", "run").body(weights)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "link.safetensors", "absent.safetensors", "pipe.safetensors",
     "large.safetensors", "other.safetensors", "run.bin", "", "."],
)  # fmt: skip
async def test_a_file_that_is_not_suitable_changes_nothing(tmp_path: Path, name: str) -> None:
    """Status 400: names that leave the directory, links, other kinds of files, too large files, other weights."""
    root = tmp_path / "root"
    root.mkdir()
    with ExitStack() as stack:
        server = InferenceServer(stack, tmp_path / "server", weights_root=str(root))
        weights = moved(server, 1)
        right = tensor_bytes(named_arrays(weights.parameters))
        (tmp_path / "outside.safetensors").write_bytes(right)
        (root / "run.bin").write_bytes(right)
        (root / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
        (root / "large.safetensors").write_bytes(b"x" * (server.receiver.max_bytes + 1))
        (root / "other.safetensors").write_bytes(tensor_bytes(named_arrays(server.policy.trainable())))
        os.mkfifo(root / "pipe.safetensors")
        headers = {VERSION_HEADER: "1", STEP_HEADER: "1", FINGERPRINT_HEADER: weights.ready.fingerprint}
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8000", transport=server.connection) as client:
            answer = await client.put("/v1/policy/weights", headers=headers | {FILE_HEADER: name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_weights")
        assert (server.policy.version, server.weights.value.version) == (0, 0)


async def test_a_server_without_a_directory_reads_no_file(tmp_path: Path) -> None:
    """The run treats it as failed."""
    with ExitStack() as stack:
        server = InferenceServer(stack, tmp_path / "server")
        with pytest.raises(RemoteFailure, match="weights-root"):
            await server.client(delivery=SharedDirectory(tmp_path / "shared", "run")).push(moved(server, 1))
