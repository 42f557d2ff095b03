"""One run by itself: time and memory."""
