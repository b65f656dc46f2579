"""How much memory a run takes: worked out before it starts, bounded and measured while it goes on."""
