"""Requests to a service on another rank, and the service's responses."""
