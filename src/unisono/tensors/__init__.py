"""Boxes of tensors, and the tensors in a batch."""
