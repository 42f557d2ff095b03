"""Unisono: train one neural network on many devices as if they were one."""
