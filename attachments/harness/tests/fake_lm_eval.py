"""Stands for lm-eval: completes each problem once over the API, and writes results in the form of lm-eval."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import httpx

parser = argparse.ArgumentParser()
parser.add_argument("run")
for flag in ("--model", "--tasks", "--model_args", "--output_path", "--limit", "--include_path"):
    parser.add_argument(flag)
chosen, _ = parser.parse_known_args()
settings = dict(one.split("=", 1) for one in chosen.model_args.split(","))
lines = (Path(chosen.include_path) / f"{chosen.tasks}.jsonl").read_text().splitlines()
problems = [json.loads(line) for line in lines][: int(chosen.limit or len(lines))]


def is_correct(problem: dict[str, str]) -> bool:
    """Whether the greedy completion ends with the answer in its tags."""
    body = {"model": settings["model"], "messages": [{"role": "user", "content": problem["prompt"]}]}
    answer = httpx.post(settings["base_url"], json={**body, "max_tokens": 96, "temperature": 0}, timeout=60).json()
    return f"<answer>{problem['answer']}</answer>" in answer["choices"][0]["message"]["content"]


accuracy = sum(map(is_correct, problems)) / len(problems)
place = Path(chosen.output_path) / "policy"
place.mkdir(parents=True)
metrics = {"alias": chosen.tasks, "exact_match,answer": accuracy, "exact_match_stderr,answer": "N/A"}
(place / f"results_{time.time()}.json").write_text(json.dumps({"results": {chosen.tasks: metrics}}))
