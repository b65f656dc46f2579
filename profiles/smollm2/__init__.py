"""The problems of the profile `smollm2`: additions of two numbers with two digits."""
