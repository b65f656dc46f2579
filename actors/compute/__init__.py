"""The mathematics: the executor thread, and synchronous MLX code that knows nothing of asyncio, queues or HTTP."""
