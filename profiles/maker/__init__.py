"""Common parts of the commands that make a small policy and its problems from a seed."""
