"""Keys and values of running rows in 8 bits: about half the memory of 16 bits, and half the bytes that a step reads."""
