"""Runs llama.cpp through the package xllamacpp: `python llama_cpp.py JOB.json`.

The job names a model, an adapter, tokens, and a file for the log-probabilities of all tokens at the next position.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp


def log_probabilities(job: dict[str, Any]) -> list[float]:
    """Let llama.cpp compute the next token."""
    settings = xllamacpp.CommonParams()
    settings.model.path = job["model"]
    settings.n_ctx, settings.n_parallel, settings.n_predict, settings.warmup = 256, 1, 1, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(job["adapter"], 1.0)]
    server = xllamacpp.Server(settings)
    request = {
        "prompt": job["tokens"],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 20,
        "n_probs": job["vocabulary"],
    }
    response = server.handle_completions(request)
    entries = response["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found = {entry["id"]: entry["logprob"] for entry in entries}
    return [found[token] for token in range(job["vocabulary"])]


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(job["out"]).write_text(json.dumps(log_probabilities(job)), encoding="utf-8")
