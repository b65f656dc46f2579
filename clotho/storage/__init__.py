"""Storage: files that are written whole or not at all, tensors, and adapters."""
