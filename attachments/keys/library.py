"""What `keys` adds to the library: API keys with names, limits and rights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.keys.sections import API_KEYS_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clotho.serving.auth import ClientKey
    from clotho.settings.server import HttpServer


def client_keys(settings: HttpServer) -> Sequence[ClientKey]:
    """Read the file of API keys, with their quotas; none without a file."""
    path = API_KEYS_FILE.of(settings)
    if not path:
        return ()
    from attachments.keys.api_keys import limited, read_api_keys

    return [limited(key) for key in read_api_keys(path)]
