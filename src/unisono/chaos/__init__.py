"""Runs a training with injected faults and one without, and compares both."""
