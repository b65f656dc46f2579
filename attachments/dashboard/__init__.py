"""The dashboard: reads run directories while and after runs write them, and serves a page with charts and rollouts."""
