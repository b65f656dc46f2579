"""Load of a server in a process of its own: many programs at once, and sampling beside the native route.

    python -m attachments.tinker.tests.load programs [SECONDS]
    python -m attachments.tinker.tests.load rates [ROUNDS] [TOKENS]

`programs`: 16 programs sample and 4 train, each its own adapter of the embedded policy; MLX keeps at most 64 MiB of
freed buffers. Then the server is killed, and a second one continues from what was saved. `rates`: 64 concurrent calls
of the SDK and 64 of /v1/completions take turns, with equal prompts and lengths.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from attachments.tinker.tests.tinker_server import Client, datum, logprobs_of, process

EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"
TOKENS = [3, 9, 12, 7, 20, 5, 30, 31, 32]
DATA = [datum(TOKENS)] * 4
CALLS = 64


class Programs:
    """Programs of users, each in a thread. seconds: duration of each of their rounds. kept: by path, see `keep`."""

    def __init__(self, url: str, base: str, *, trainers: int, samplers: int, rounds: int = 0) -> None:
        """Start them. rounds: those of training after which the first ends them all; 0: they continue until `end`."""
        self._rounds = rounds
        self.url, self.base, self.ending = url, base, threading.Event()
        self.seconds = defaultdict[str, list[float]](list)
        self.failures: list[BaseException] = []
        self.kept: dict[str, list[list[float]]] = {}
        names = [f"train-{i}" for i in range(trainers)] + [f"sample-{i}" for i in range(samplers)]
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in names]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let all programs end."""
        self.ending.set()
        for thread in self._threads:
            thread.join()

    def made(self, kind: str) -> list[list[float]]:
        """Return the seconds of the programs of a kind."""
        return [found for name, found in self.seconds.items() if name.startswith(kind)]

    def _run(self, name: str) -> None:
        try:
            client = Client(self.url)
            model_id = client.model(self.base, rank=2 + len(name) % 3)
            sampler = client.sampler(model_id)
            while not self.ending.is_set():
                began = time.monotonic()
                if name.startswith("train"):
                    client.gradient(model_id, DATA)
                    client.step(model_id, learning_rate=1e-3)
                    client.sampler(model_id)
                else:
                    client.sample(sampler, TOKENS, max_tokens=16, num_samples=2, stop=[])
                self.seconds[name].append(time.monotonic() - began)
                if name.startswith("train") and len(self.seconds[name]) == self._rounds:
                    self.ending.set()
            if name.startswith("train"):
                self.keep(client, model_id)
            client.http.close()
        except BaseException as error:
            self.failures.append(error)
            self.ending.set()

    def keep(self, client: Client, model_id: str) -> None:
        """Save the state of training, with what the model then computes."""
        path = client.result("save_weights", model_id=model_id, path="kept")["path"]
        self.kept[path] = logprobs_of(client.forward(model_id, DATA))


def show(**found: Any) -> None:
    """Print results."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def programs(seconds: float) -> None:
    """Measure many programs, and kill the server."""
    with TemporaryDirectory() as scratch:
        with process(EMBEDDED, Path(scratch), "--memory.cache-limit-mib", "64") as (running, url):
            server, memory = psutil.Process(running.pid), list[float]()
            load = Programs(url, str(EMBEDDED), trainers=4, samplers=16)
            until = time.monotonic() + seconds
            while time.monotonic() < until and not load.ending.wait(min(10.0, seconds / 20)):
                memory.append(server.memory_info().rss / 2**20)
            load.end()
            running.kill()
        for kind in ("train", "sample"):
            made = [sorted(one) for one in load.made(kind)]
            of_20 = [one[len(one) * 19 // 20] for one in made]
            waits, longest = [median(one) for one in made], [one[-1] for one in made]
            show(kind=kind, rounds=[len(one) for one in made], median=waits, one_of_20=of_20, longest=longest)
        show(
            failures=[str(one) for one in load.failures], seconds=seconds, rss_mib=memory[:: max(1, len(memory) // 10)]
        )
        with process(EMBEDDED, Path(scratch)) as (_, url):
            client = Client(url)
            for number, (path, before) in enumerate(load.kept.items()):
                call = {"session_id": client.session, "model_seq_id": number, "path": path, "optimizer": True}
                found = logprobs_of(client.forward(client.result("load_weights", **call)["model_id"], DATA))
                show(path=path, equal_after_the_kill=found == before)
            client.http.close()


def rates(rounds: int, length: int) -> None:
    """Measure tokens per second, and processor seconds of server and client, of both routes in turn."""
    with TemporaryDirectory() as scratch, process(EMBEDDED, Path(scratch)) as (running, url):
        routes = {"sdk": sdk_calls(url, length), "native": native_calls(url, length)}
        both = psutil.Process(running.pid), psutil.Process()
        found = defaultdict[str, list[list[float]]](list)
        for number in range(rounds + 1):
            for name, calls in routes.items():
                used, began = [sum(one.cpu_times()[:2]) for one in both], time.monotonic()
                tokens = calls()
                seconds = time.monotonic() - began
                spent = [sum(one.cpu_times()[:2]) - before for one, before in zip(both, used, strict=True)]
                if number:  # the first round compiles
                    found[name].append([tokens / seconds, *(1000 * one / tokens for one in spent)])
        names = ("tokens_per_second", "server_seconds_per_1000", "client_seconds_per_1000")
        medians = {
            name: dict(zip(names, map(median, zip(*one, strict=True)), strict=True)) for name, one in found.items()
        }
        shares = [sdk[0] / native[0] for sdk, native in zip(found["sdk"], found["native"], strict=True)]
        show(**medians, sdk_to_native=shares)


def sdk_calls(url: str, length: int) -> Callable[[], int]:
    """Return what makes concurrent calls of the SDK, and returns the number of tokens that came back."""
    import tinker
    from tinker import types

    service: Any = tinker.ServiceClient(base_url=url, api_key="tml-load")
    sampler: Any = service.create_sampling_client(
        base_model=service.get_server_capabilities().supported_models[0].model_name
    )
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    params = types.SamplingParams(max_tokens=length, stop=[])

    def calls() -> int:
        futures = [sampler.sample(types.ModelInput.from_ints([*TOKENS, i]), 1, params) for i in range(CALLS)]
        return sum(len(future.result().sequences[0].tokens) for future in futures)

    return calls


def native_calls(url: str, length: int) -> Callable[[], int]:
    """Return what makes concurrent requests of /v1/completions."""
    client, threads = (
        httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=CALLS)),
        ThreadPoolExecutor(CALLS),
    )

    def call(i: int) -> int:
        body = {
            "prompt": [*TOKENS, i],
            "max_tokens": length,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        return int(client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])

    return lambda: sum(threads.map(call, range(CALLS)))


def main(arguments: Sequence[str]) -> None:
    """Run the measurement of this name."""
    name, *rest = arguments
    if name == "programs":
        programs(float(rest[0]) if rest else 600.0)
    else:
        rounds, length = map(int, (rest + ["5", "64"][len(rest) :]))
        rates(rounds, length)


if __name__ == "__main__":
    main(sys.argv[1:])
