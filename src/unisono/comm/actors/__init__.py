"""Requests to a service on another rank, and its responses."""
