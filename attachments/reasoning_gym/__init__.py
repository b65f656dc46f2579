"""Problems that Reasoning Gym generates, and their rewards."""
