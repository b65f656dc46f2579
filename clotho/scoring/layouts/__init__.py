"""How sequences lie in a micro-batch, and how hidden states are computed for each way."""
