"""Other frameworks train on Unisono's communicators, each by its own extension point."""
