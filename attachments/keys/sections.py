"""The settings of API keys in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import about
from clotho.settings.mounted import Setting

API_KEYS_FILE = Setting[str](
    path="server.api_keys_file",
    kind=Annotated[str, about("TOML file of API keys with names and limits; empty: none.")],
    default="",
    attachment="keys",
    after="api_key",
    paths={"server.api_keys_file": "input"},
)

SETTINGS = (API_KEYS_FILE,)
