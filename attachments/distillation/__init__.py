"""On-policy distillation: the policy learns from what a teacher says about its own completions."""
