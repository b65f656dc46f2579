"""Episodes: conversations of the policy with environments, which come in the place of completions."""
