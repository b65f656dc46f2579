"""API keys with limits."""
