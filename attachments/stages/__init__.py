"""Stages of a run, such as supervised fine-tuning before reinforcement learning, in one profile."""
