"""Runs whose workers are killed, frozen or replaced, and what elasticity costs without faults."""
