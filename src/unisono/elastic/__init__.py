"""What happens to a worker when the group changes: session, state transfer, in-memory checkpoints, rollback."""
