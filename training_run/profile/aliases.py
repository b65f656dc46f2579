"""Other names of commands, shipped profiles and keys, which are accepted wherever their own names are."""

from __future__ import annotations

COMMANDS = {"fuse": "merge", "evaluate": "eval", "upload": "push"}
"""Words of mlx-lm for commands, with their names here."""

PROFILE_NAMES = {"quickstart": "local-m3", "times-table": "learn-m3", "qwen3-0.6b": "qwen3-m3"}
"""Names of shipped profiles that say what they train, with the names of their files."""

KEYS = {"monitor.cache_limit_mb": "memory.cache_limit_mib", "monitor.wired_limit_mb": "memory.wired_limit_mib"}
"""Earlier names of keys, in profiles, in the settings of earlier runs and as flags."""

SHORT = {"model": "model.path", "dataset": "data.train"}
"""Short names of flags, with their keys."""
