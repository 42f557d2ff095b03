"""The same network on one worker and on two: the same weights, bit for bit."""

import unisono
from custom_task import blobs

for workers in (1, 2):
    config = unisono.Config(workers=workers, steps=60, compress=unisono.Exact())
    result = unisono.train(blobs(width=16), config)
    print(workers, result.metrics["accuracy"], result.weights_sha256, result.run)
