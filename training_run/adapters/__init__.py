"""Files of adapters: formats, reading with validation, and an adapter in memory."""
