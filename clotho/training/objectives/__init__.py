"""Policy objectives, corrections and penalties: one function per equation, chosen from tables."""
