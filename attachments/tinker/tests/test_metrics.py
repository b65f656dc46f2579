"""What /metrics shows of the programs that train and sample."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import mlx.core as mx

from attachments.tinker.tests.tinker_server import datum, tinker_server
from tests import saved_models

METRICS = {
    "clotho_tinker_sessions": "gauge", "clotho_tinker_requests": "gauge", "clotho_tinker_steps": "gauge",
    "clotho_tinker_model_bytes": "gauge", "clotho_tinker_budget_bytes": "gauge", "clotho_tinker_adapters": "gauge",
    "clotho_tinker_learner_queue": "gauge",
}  # fmt: skip
"""The metrics of the attachment and their types."""


def test_metrics_show_the_sessions_and_their_models(tmp_path: Path) -> None:
    """Nothing before the first request; then the SDK, the steps of models and their memory. A page shows them too."""
    saved_models.save(tmp_path / "model", dtype=mx.float32)
    with tinker_server(tmp_path / "model", tmp_path / "measured") as live:
        address = f"{live.url}/metrics"
        assert "clotho_tinker" not in httpx.get(address).text
        client = live.client()
        model_id = client.model(str(tmp_path / "model"))
        client.gradient(model_id, [datum([3, 9, 12, 7, 20, 5])])
        client.step(model_id, learning_rate=1e-3)
        shown, page = httpx.get(address).text, httpx.get(live.url, follow_redirects=True).text
    assert 'clotho_tinker_sessions{sdk="test"} 1.0' in shown
    assert f'clotho_tinker_steps{{model="{model_id}"}} 1.0' in shown
    assert f"<td>{model_id}</td><td>4</td><td>1</td>" in page
    assert dict(re.findall(r"^# TYPE (clotho_tinker\w+) (\w+)$", shown, re.MULTILINE)) == METRICS
