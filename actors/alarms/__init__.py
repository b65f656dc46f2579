"""Signs that the policy collapses or cheats the rewards, read from the learner's reports; plain Python."""
