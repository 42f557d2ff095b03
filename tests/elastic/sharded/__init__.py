"""Replicas that lie on several workers, while workers come and go."""
