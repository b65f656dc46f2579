"""What a person sees of a run: a live screen, or plain lines, and a table at the end."""
