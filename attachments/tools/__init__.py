"""Tool calls, reasoning and structured outputs of the chat API."""
