"""Sessions of HTTP clients, whose rewards train the policy."""
