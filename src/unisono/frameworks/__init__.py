"""Other frameworks exchange gradients by Unisono, each by its own extension point."""
