"""Problems chosen by their success rates."""
