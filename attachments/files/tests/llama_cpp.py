"""Runs llama.cpp through the package xllamacpp: `python llama_cpp.py JOBS.json`.

A job names a model, an optional adapter, a prompt (tokens or a text), a number of tokens to sample greedily, and a file
for the result: the tokens of the prompt, the sampled tokens, and the log-probabilities of all tokens at the first
position after the prompt.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


def ask(server: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the server of llama.cpp in this process."""
    body = json.dumps(request).encode()
    message = urllib.request.Request(f"{server.listening_address}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(message) as response:
        found: dict[str, Any] = json.load(response)
        return found


def sampled(job: dict[str, Any]) -> dict[str, Any]:
    """Let llama.cpp continue the prompt."""
    settings = xllamacpp.CommonParams()
    settings.model.path = job["model"]
    settings.n_ctx, settings.n_parallel, settings.n_predict, settings.warmup = 256, 1, 1, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if "adapter" in job:
        settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(job["adapter"], 1.0)]
    server = xllamacpp.Server(settings)
    prompt = job["prompt"]
    if isinstance(prompt, str):
        prompt = ask(server, "/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
    request = {"prompt": prompt, "temperature": 0.0, "return_tokens": True}
    # llama.cpp reports no probabilities for a token that is a part of a character, so a whole one is sampled
    letter = ask(server, "/tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    forced = {**request, "n_predict": 1, "logit_bias": [[letter, 1e4]], "n_probs": job["vocabulary"]}
    scored = ask(server, "/completion", forced)
    first = {entry["id"]: entry["logprob"] for entry in scored["completion_probabilities"][0]["top_logprobs"]}
    return {
        "prompt": prompt,
        "tokens": ask(server, "/completion", {**request, "n_predict": job["count"]})["tokens"],
        "log_probabilities": [first.get(token) for token in range(job["vocabulary"])],
    }


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        Path(job["out"]).write_text(json.dumps(sampled(job)), encoding="utf-8")
