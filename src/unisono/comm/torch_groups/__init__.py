"""torch.distributed behind the communicator protocol."""
