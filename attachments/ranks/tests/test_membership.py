"""How ranks find rank 0, and whose connections rank 0 accepts."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attachments.ranks.membership import TOKEN, Membership, accept, coordinator
from protocols.errors import ProfileError

SECRET = bytes(range(16))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([["192.168.1.10:32323"], ["192.168.1.11:32324"]], "192.168.1.10"),
        ([["10.0.0.1:32323", "10.1.0.1:32324"], ["10.0.0.2:32325"]], "10.0.0.1"),
        ([["[fe80::1]:32323"], ["[fe80::2]:32324"]], "fe80::1"),
    ],
    ids=["one address", "several addresses", "IPv6"],
)
def test_the_ring_has_the_address_of_rank_0_in_its_host_file(
    tmp_path: Path, hosts: list[list[str]], expected: str
) -> None:
    """`mlx.launch` writes the file at every rank."""
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(hosts), encoding="utf-8")
    assert coordinator({"MLX_HOSTFILE": str(path)}) == expected


def test_other_backends_have_the_address_of_rank_0_in_a_variable() -> None:
    """jaccl names address and port, nccl the address."""
    assert coordinator({"MLX_JACCL_COORDINATOR": "192.168.1.10:32323", "MLX_RANK": "1"}) == "192.168.1.10"
    assert coordinator({"NCCL_HOST_IP": "192.168.1.10", "NCCL_PORT": "1"}) == "192.168.1.10"


def test_ranks_without_an_address_of_rank_0_are_refused() -> None:
    """Something other than `mlx.launch` has set the rank."""
    with pytest.raises(ProfileError):
        coordinator({"MLX_RANK": "1"})


def test_rank_0_accepts_ranks_with_the_token_only() -> None:
    """A wrong token, a rank that does not exist, a second rank 1 and a short message are closed."""
    wrong = [TOKEN.pack(bytes(16), 1), TOKEN.pack(SECRET, 3), TOKEN.pack(SECRET, 0), b"GET / HTTP/1.1"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = []
        for sent in [*wrong, TOKEN.pack(SECRET, 2), TOKEN.pack(SECRET, 2), TOKEN.pack(SECRET, 1)]:
            clients.append(socket.create_connection(listener.getsockname()))
            clients[-1].sendall(sent)
            clients[-1].shutdown(socket.SHUT_WR)
        accepted = accept(listener, SECRET, 3)
    assert [rank for rank, _ in accepted] == [1, 2]
    for rank, connection in accepted:
        connection.sendall(bytes([rank]))
        connection.close()
    assert [client.recv(1) for client in clients] == [b"", b"", b"", b"", b"\x02", b"", b"\x01"]
    for client in clients:
        client.close()


def test_the_end_of_other_ranks_is_ignored_once_the_run_ends() -> None:
    """The supervisor is told; a process that is ending already says so."""
    told: list[dict[str, object]] = []
    exits: list[int] = []
    group = object.__new__(Membership)
    group.rank, group._links, group._ending = 1, {}, threading.Lock()
    group._exit = cast(Any, exits.append)
    group._supervisor = cast(Any, SimpleNamespace(tell=lambda **fields: told.append(fields)))
    assert group.expect_end()
    group.end("lost rank 0")
    assert (exits, told) == ([], [{"ended": True}])
    assert not group.expect_end()
