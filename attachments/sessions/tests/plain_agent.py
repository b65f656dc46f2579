"""An agent without packages, of which many are killed: it begins sessions, and writes what it was promised.

Arguments: port, number of the agent, file. Every line of the file is written before the next request.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from itertools import count
from typing import Any, TextIO


class Server:
    """The server of a run, which may be down. life: of the receipt of the last answer. Each request connects anew."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.receipt = ""

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer. Raises OSError if there is none, and LookupError if the server refuses."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("POST", f"/v1/{path}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError from error
        finally:
            connection.close()
        if answer.status != 200:
            raise LookupError(content.decode())
        self.receipt = answer.headers.get("x-clotho-receipt", "")
        return json.loads(content)


def play(server: Server, marker: str, write: TextIO) -> None:
    """Ask twice, and post a reward. marker: a number that the second question contains."""
    reward = float(int(marker) % 3 == 0)

    def note(what: str) -> None:
        write.write(json.dumps([what, marker, server.receipt, reward]) + "\n")
        write.flush()

    messages = [{"role": "user", "content": "Ann has many coins. How many coins now?"}]
    for question in ("", f"Ann has {marker} coins. How many coins now?"):
        if question:
            messages.append({"role": "user", "content": question})
        answer = server.post("chat/completions", messages=messages, user=marker, max_tokens=6, temperature=1.0)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        note("answered")
    receipt = server.receipt
    note("posted")
    server.post("rewards", session=marker, reward=reward)
    server.receipt = receipt
    note("accepted")


def main() -> None:
    """Play until killed. What the end of a run interrupts is begun again as another session."""
    port, number, path = sys.argv[1:]
    server = Server(int(port))
    with open(path, "w", encoding="utf-8") as write:
        for attempt in count():
            try:
                play(server, f"{int(number) + 1000}{attempt:05}", write)
            except (OSError, LookupError):
                time.sleep(0.5)  # the run has ended, or is being started


if __name__ == "__main__":
    main()
