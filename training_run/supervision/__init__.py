"""The runtime: queues, latest-value cell, supervisor, signals, compute threads, plug-ins."""
