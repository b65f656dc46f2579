"""The runtime: queues, latest-value cell, supervisor, signals, compute thread, plug-ins."""
