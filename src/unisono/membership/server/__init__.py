"""The coordinator as an HTTP server."""
