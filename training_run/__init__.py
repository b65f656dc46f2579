"""What a run needs around its actors: command line, profile, start, supervision and records."""
