"""The OpenAI-compatible HTTP API of the policy. This package contains no mathematics."""
