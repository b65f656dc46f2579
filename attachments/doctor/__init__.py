"""Checks before the first prompt: of the settings, the libraries, the chat template and the problems, and `doctor`."""
