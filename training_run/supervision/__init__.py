"""What keeps actors running: queues, latest values, the supervisor, watchdogs, signals and custom actors."""
