"""What the operating system offers: processes, files, output streams, pauses."""
