"""How a step is taken: gradients, micro-batches, data feed, checkpoint schedule, evaluation."""
