"""Requests that combine all fields of generation, mutated, and a campaign that sends them to a `serve` process.

    python -m tests.serving.mutated_requests [--requests 20000] [--seed 0]

The campaign serves the embedded policy, whose vocabulary is a multiple of 32, with two adapters and a chat template
that knows tools. Requests are sent in batches, so that the rows of several requests share their decode steps. A valid
request follows every batch, and its completion must not change. Prints the number of responses by status and the memory
of the server; the exit status is 1 if a request failed in the server, and the bodies of such requests are printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import anyio
import httpx

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "profiles" / "embedded"
ADAPTERS = ("math", "code")
BATCH = 16
LIMIT_SECONDS = 120.0
GOOD = {"prompt": "1 + 1 =", "max_tokens": 4, "temperature": 0, "return_token_ids": True}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LARK = 'start: "a" /[0-9]{1,4}/'
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "sub", "parameters": SCHEMA, "strict": True}}
TEMPLATE = "{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools>' }}{%- endif %}"
"""Beginning of a chat template that knows tools."""

TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
MESSAGES = [{"role": "user", "content": "1 + 1 ="}]

GRAMMARS: dict[str, list[Any]] = {
    "guided_regex": ["[ab]+", "[0-9]{1,3}", "(?s:.*)", "x{0,200}", "("],
    "guided_choice": [["yes", "no"], ["a", "ab", "abc"], ["\U0001f600"]],
    "guided_json": [SCHEMA, {"type": "boolean"}, json.dumps(SCHEMA), {}],
    "guided_grammar": [LARK, 'root ::= "a" | "b" root', "start: start"],
    "response_format": [
        {"type": "text"}, {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, {"type": "structural_tag", **TAG},
    ],
    "structured_outputs": [
        {"json": SCHEMA}, {"regex": "[ab]{2}"}, {"choice": ["a", "b"]}, {"grammar": LARK}, {"json_object": True},
        {"structural_tag": json.dumps({"type": "structural_tag", **TAG})},
    ],
}  # fmt: skip
SAMPLING: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "seed": [0, 7, 2**63 - 1],
    "max_tokens": [1, 2, 5, 8],
    "min_tokens": [0, 1, 3, 5, 8],
    "bad_words": [["a"], ["1", "yes", "{"], ["\U0001f600"], ["the quick"]],
    "stop": ["a", ["1", "}"], ["\n", " "]],
    "stop_token_ids": [[97], [0, 383], list(range(100))],
    "allowed_token_ids": [[97, 98], [383], list(range(384)), list(range(0, 384, 2))],
    "logit_bias": [{"97": 5}, {"0": -100, "383": 100}, {str(token): -100 for token in range(384)}],
    "temperature": [0, 1e-5, 0.7, 1, 100],
    "top_p": [1e-6, 0.5, 1],
    "top_k": [0, 1, 5, 384, 2**31],
    "min_p": [0, 0.1, 1],
    "repetition_penalty": [0.01, 1, 1.5, 10],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0, 2],
    "ignore_eos": [True, False],
}
NATIVE = {"model": ["policy", *ADAPTERS], **SAMPLING}
OPENAI: dict[str, list[Any]] = {
    **NATIVE, "stream": [True, False], "stream_options": [{"include_usage": True}], "return_token_ids": [True],
    "skip_special_tokens": [True, False], "include_stop_str_in_output": [True, False], "echo": [True, False],
    "prompt_logprobs": [0, 3, 20], "return_tokens_as_token_ids": [True], "truncate_prompt_tokens": [-1, 1, 4],
    "request_id": ["one", "two"],
}  # fmt: skip


class Form(NamedTuple):
    """One format of requests. base: fields that every request has. fields: further fields, and some of their values.

    inside: the field that contains the further fields; empty: they are fields of the request.
    """

    route: str
    base: dict[str, Any]
    fields: dict[str, list[Any]]
    inside: str = ""


CHAT = {
    **OPENAI,
    "logprobs": [True, False],
    "top_logprobs": [0, 5, 20],
    "tools": [[TOOL], [STRICT], [TOOL, STRICT], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "add"}}],
    "parallel_tool_calls": [True, False],
}
FUNCTION = {"type": "function", "name": "add", "parameters": SCHEMA}
BY_TOKEN = {"n", "max_tokens", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"}
RESPONSES: dict[str, list[Any]] = {
    **{name: values for name, values in NATIVE.items() if name not in BY_TOKEN},
    "max_output_tokens": SAMPLING["max_tokens"],
    "tools": [[FUNCTION], [{**FUNCTION, "strict": True}], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "name": "add"}],
    "text": [{"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}],
    "include": [["message.output_text.logprobs"]],
    "top_logprobs": [0, 5, 20],
    "stream": [True, False],
    "request_id": ["one", "two"],
}
SGLANG = {
    **{name: SAMPLING[name] for name in SAMPLING if name not in {"max_tokens", "min_tokens"}},
    "max_new_tokens": SAMPLING["max_tokens"],
    "min_new_tokens": SAMPLING["min_tokens"],
    "regex": ["[ab]+"],
    "json_schema": [json.dumps(SCHEMA)],
    "ebnf": ['root ::= "a" | "b" root'],
}
ROLLOUT = {
    **{name: values for name, values in SAMPLING.items() if name not in {"n", "seed", "logit_bias", "bad_words"}},
    "stop": [["a"], ["1", "}"]],
    "logit_bias": [[[97, 5.0]], [[383, -100.0], [0, 100.0]]],
    "bad_words": [[[97]], [[1, 2], [383]]],
    "top_logprobs": [0, 5, 20],
}
LIMITED = {"max_tokens": 8}
FORMS = [
    Form("/v1/completions", {"prompt": "1 + 1 =", **LIMITED}, {**OPENAI, "logprobs": [0, 5, 20]}),
    Form("/v1/completions", {"prompt": [[1, 2, 383], [3]], **LIMITED}, {**OPENAI, "logprobs": [0, 1]}),
    Form("/v1/chat/completions", {"messages": MESSAGES, **LIMITED}, CHAT),
    Form("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], **LIMITED}, CHAT),
    Form("/v1/responses", {"input": "1 + 1 =", "max_output_tokens": 8}, RESPONSES),
    Form("/v1/responses", {"input": MESSAGES, "tools": [FUNCTION], "max_output_tokens": 8}, RESPONSES),
    Form("/generate", {"prompt": "a", **LIMITED}, {**NATIVE, "logprobs": [0, 5], "prompt_logprobs": [0, 2]}),
    Form("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 8}}, SGLANG, "sampling_params"),
    Form("/v1/generate", {"prompts": ["a", [1, 2]], **LIMITED}, {**NATIVE, "structured_outputs_regex": ["[ab]+"]}),
    Form(
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": LIMITED},
        {**SAMPLING, "logprobs": [0, 5], "prompt_logprobs": [0, 2]},
        "sampling_params",
    ),
    Form("/v1/rollouts", {"prompt": [1, 2], "sampling": LIMITED, "seeds": [1, 2]}, ROLLOUT, "sampling"),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 383]}),
    ("/abort_requests", {"request_ids": ["one"]}),
    ("/abort_request", {"rid": "two"}),
    ("/v1/load_lora_adapter", {"lora_name": "code", "lora_path": "code", "load_inplace": True}),
    ("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "math"}),
    ("/v1/unload_lora_adapter", {"lora_name": "other"}),
    ("/lora/load", {"adapter_path": "code"}),
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 383, 384, 2**31, 2**63, -(2**63), 2**64, 0.5, -0.0, 1e-300, 1e300, "", "a", "\x00",
    "\ud800", "\U0001f600", "policy", "x" * 3000, [], {}, [[]], [None], {"": 0}, ["a"] * 200, [0] * 3000,
    {"a": {"a": []}},
]  # fmt: skip
LITERALS = [b"NaN", b"1e999", b"9" * 5000, b'"\xff"', b"[" * 3000, b"}", b"\x00", b'"a":1,', b"", b"null"]


SERVER_ERROR = re.compile('"(server_error|generation_failed|internal_error)"')
STREAM_END = re.compile(r'(data: \[DONE\]|"type":"response\.(completed|incomplete|failed)".*)\n\n$')


class Mutator:
    """A sequence of requests that depends on a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def request(self) -> tuple[str, bytes]:
        """Return the next route and body: a combination of fields, valid in half of the cases before it is mutated."""
        random = self._random
        if random.random() < 0.05:
            route, fields = random.choice(OTHERS)
            fields = copy.deepcopy(fields)
        else:
            route, fields = self._combination(random.choice(FORMS))
        if random.random() < 0.5:
            return route, json.dumps(fields).encode()
        for _ in range(random.randint(1, 3)):
            self._mutate(fields)
        body = json.dumps(fields).encode()
        if random.random() < 0.2:
            begin = random.randrange(len(body))
            end = begin + random.choice([0, 1, 8])
            body = body[:begin] + random.choice([*LITERALS, random.randbytes(3)]) + body[end:]
        return route, body

    def _combination(self, form: Form) -> tuple[str, dict[str, Any]]:
        """Return a request with up to six further fields, and a grammar in half of the cases."""
        random, fields = self._random, copy.deepcopy(form.base)
        target = fields[form.inside] if form.inside else fields
        for name in random.sample(sorted(form.fields), random.randint(0, 6)):
            target[name] = copy.deepcopy(random.choice(form.fields[name]))
        takes_grammar = form.fields is not SGLANG and form.fields is not ROLLOUT
        if takes_grammar and random.random() < 0.5:
            name = random.choice(sorted(GRAMMARS))
            target[name] = copy.deepcopy(random.choice(GRAMMARS[name]))
        return form.route, fields

    def _mutate(self, fields: dict[str, Any]) -> None:
        """Change, add or remove one value at any depth."""
        random = self._random
        target: Any = fields
        while inner := [one for one in _children(target) if isinstance(one, dict | list) and one]:
            if random.random() < 0.6:
                break
            target = random.choice(inner)
        value: Any = copy.deepcopy(random.choice(VALUES))
        if not target:
            return
        key: Any = random.choice(sorted(target)) if isinstance(target, dict) else random.randrange(len(target))
        if random.random() < 0.15:
            del target[key]
        elif isinstance(target, dict) and random.random() < 0.15:
            target[random.choice([*CHAT, "unknown", ""])] = value
        else:
            target[key] = value


def _children(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value


class Failure(NamedTuple):
    """A request that failed in the server. detail: of the response."""

    route: str
    body: bytes
    detail: str


async def send_all(http: httpx.AsyncClient, requests: int, seed: int) -> tuple[Counter[str], list[Failure]]:
    """Send mutated requests in batches; return the number of responses by status, and the failures.

    Raises AssertionError if a valid request fails or has another completion than before.
    """
    mutator, statuses, failures = Mutator(seed), Counter[str](), list[Failure]()
    expected = (await http.post("/v1/completions", json=GOOD)).json()["choices"][0]["token_ids"]

    async def send(route: str, body: bytes) -> None:
        answer = await http.post(route, content=body, headers={"content-type": "application/json"})
        statuses[str(answer.status_code)] += 1
        broken = answer.status_code >= 500 and answer.status_code != 503
        if "event-stream" in answer.headers.get("content-type", ""):
            broken |= bool(SERVER_ERROR.search(answer.text)) or not STREAM_END.search(answer.text)
        if broken:
            failures.append(Failure(route, body, answer.text[-500:]))

    for begin in range(0, requests, BATCH):
        async with anyio.create_task_group() as group:
            for _ in range(min(BATCH, requests - begin)):
                group.start_soon(send, *mutator.request())
        good = await http.post("/v1/completions", json=GOOD)
        assert good.status_code == 200, good.text
        assert good.json()["choices"][0]["token_ids"] == expected
    return statuses, failures


def write_model(directory: Path) -> Path:
    """Write the embedded policy with a chat template that knows tools, and `ADAPTERS` beside it; return the model."""
    from attachments.adapters.tests.adapter_models import write_mlx_adapter
    from clotho.models.loading import load_base
    from clotho.settings.model import ModelSection

    policy = load_base(ModelSection(path=str(EMBEDDED)))[0]
    for seed, name in enumerate(ADAPTERS):
        write_mlx_adapter(directory / name, policy, seed=seed, size=0.05)
    model = Path(shutil.copytree(EMBEDDED, directory / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def memory(process: int) -> dict[str, int]:
    """Return the resident memory of a process and its highest value, in MiB."""
    text = Path(f"/proc/{process}/status").read_text()
    return {name: int(re.findall(rf"{name}:\s+(\d+)", text)[0]) // 1024 for name in ("VmRSS", "VmHWM")}


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory))
        command = [sys.executable, "pipeline.py", "serve", "--model", str(model), "--server.port", "0"]
        command += ["--server.tool-parser", "hermes", "--server.max-answer-seconds", "10"]
        command += ["--server.adapters.root", directory]
        command += [word for name in ADAPTERS for word in ("--adapter", f"{name}={directory}/{name}")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                return _attack(process, chosen.requests, chosen.seed)
            finally:
                process.terminate()


def _attack(process: subprocess.Popen[str], requests: int, seed: int) -> int:
    assert process.stdout is not None
    url = next(found[0] for line in process.stdout if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)))
    before = memory(process.pid)

    async def attack() -> tuple[Counter[str], list[Failure]]:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as http:
            return await send_all(http, requests, seed)

    statuses, failures = anyio.run(attack)
    lines = [f"{failure.route} {failure.body[:3000]!r}\n  {failure.detail}" for failure in failures]
    lines.append(f"{requests} requests: {dict(sorted(statuses.items()))}; failures: {len(failures)}")
    lines.append(f"memory of the server in MiB, before: {before}, after: {memory(process.pid)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
