"""The HTTP face: an OpenAI-compatible API in front of the policy. No mathematics."""
