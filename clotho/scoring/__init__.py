"""Scoring: teacher-forced log-probabilities, batch layouts."""
