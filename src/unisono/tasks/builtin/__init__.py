"""The tasks that come with the library."""
