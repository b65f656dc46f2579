"""A client of the dashboard in a process of its own: follows the events of a run to their end, and prints their number.

python -m bench.contenders.event_client PORT
"""

from __future__ import annotations

import sys
import time
from http.client import HTTPConnection
from itertools import count

ATTEMPTS, PAUSE_SECONDS = 600, 0.1
"""The server of a run does not listen before the model is loaded."""


def follow(port: int) -> int:
    """Return the number of events of the run at this port. Raises OSError if no server answers."""
    for attempt in count(1):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/dashboard/api/runs/0/events")
            with connection.getresponse() as response:
                if response.status == 200:
                    return sum(line.startswith(b"event:") for line in response)
        except OSError:
            if attempt == ATTEMPTS:
                raise
        connection.close()
        time.sleep(PAUSE_SECONDS)
    return 0


if __name__ == "__main__":
    sys.stdout.write(f"{follow(int(sys.argv[1]))}\n")
