"""Alarms of a run: collapse of the policy, throughput, and the way back to healthy weights."""
