"""Tasksets of the library verifiers, whose environments the policy acts in."""
