"""Dialects of the HTTP API: SGLang, vLLM, TRL, tokens, and `/v1/responses`."""
