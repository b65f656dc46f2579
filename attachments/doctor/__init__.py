"""Checks before the first prompt: of the machine, the libraries, the chat template and the problems, and `doctor`."""
