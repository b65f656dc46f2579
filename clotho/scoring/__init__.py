"""Scoring: teacher-forced log-probabilities, parity, batch layouts."""
