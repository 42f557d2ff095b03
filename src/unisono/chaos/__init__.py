"""Runs a training without faults and again with injected faults, and compares both runs."""
