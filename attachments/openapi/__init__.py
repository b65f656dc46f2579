"""GET /openapi.json: the HTTP API, described."""
