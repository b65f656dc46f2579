"""What a killed server keeps, and what it says about the rest."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from attachments.tinker.tests.tinker_server import Client, datum, logprobs_of, process
from tests import saved_models

DATA = [datum([3, 9, 12, 7, 20, 5])]


@pytest.mark.slow
def test_a_killed_server_continues_with_what_was_saved(tmp_path: Path) -> None:
    """Bit by bit, and it says how many steps were lost. Sessions and their models are gone."""
    saved_models.save(tmp_path / "model", dtype=mx.float32)
    with process(tmp_path / "model", tmp_path) as (running, url):
        client = Client(url)
        model_id = client.model(str(tmp_path / "model"))
        for step in range(3):
            client.gradient(model_id, DATA)
            client.step(model_id, learning_rate=1e-2)
            if step == 1:
                path = client.result("save_weights", model_id=model_id, path="second")["path"]
                before = logprobs_of(client.forward(model_id, DATA))
        running.send_signal(signal.SIGKILL)
        running.wait()
        client.http.close()
    with process(tmp_path / "model", tmp_path) as (_, url):
        gone = httpx.post(f"{url}/api/v1/session_heartbeat", json={"session_id": client.session})
        assert gone.status_code == 410
        lost = httpx.post(f"{url}/api/v1/get_info", json={"model_id": model_id})
        assert (lost.status_code, lost.json()["error"]["code"]) == (410, "not_in_memory")
        assert "3 steps" in lost.json()["error"]["message"]
        assert path in lost.json()["error"]["message"]
        later = Client(url)
        call = {"session_id": later.session, "model_seq_id": 1, "path": path, "optimizer": True}
        assert logprobs_of(later.forward(later.result("load_weights", **call)["model_id"], DATA)) == before
        later.http.close()
