"""Boxes of tensors, and the tensors of a batch."""
