"""Storage: files that are written whole or not at all, tensors, adapters, and JSON text."""
