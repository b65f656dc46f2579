"""Many adapters at once: kept in banks, loaded by name, and served beside the policy."""
