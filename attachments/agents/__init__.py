"""Episodes of several turns: the policy acts in an environment of Python, with tools or in a conversation."""
