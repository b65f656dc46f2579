"""The machine under a run: its resources, memory pressure and macOS settings."""
