"""The coordinator as an HTTP service."""
