"""Services of the operating system: processes, files, output streams, back-off."""
