"""A run: command line, start-up and run context."""
