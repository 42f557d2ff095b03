"""The cells of the campaign that cover most, for the test suite."""

from __future__ import annotations

from tests.campaigns.layouts.cells import Cell
from tests.campaigns.layouts.resume_pairs import Pair

STEPS = 5
CELLS = (
    Cell("gpt", "sgd", "Layout(shard=2, tensor=2, pipeline=2)"),
    Cell("llama", "adamw", "Layout(tensor=2, pipeline=2)"),
    Cell("bert", "sgd", "Layout(tensor=2, context=2)"),
    Cell("bart", "adamw", "Layout(tensor=2)"),
    Cell("gpt", "adafactor", "Layout(tensor=2, pipeline=2)"),
    Cell("cnn", "adafactor", "Layout(shard=2)", 2, "LocalSGD(every=4)"),
    Cell("cnn", "sgd", "Layout(pipeline=4)"),
    Cell("cnn", "adamw", "Layout(shard=2)", 2, "LocalSGD(every=4)"),
    Cell("lstm", "adamw", "Layout(shard=2, tensor=2)"),
    Cell("lstm", "sgd", "Layout(context=2)"),
    Cell("drops", "sgd", "Layout(shard=2, pipeline=2)"),
    Cell("odd", "adamw", "Layout(pipeline=2)", 2, "ParameterServer()"),
)
CORNERS = (
    Cell("methods", "sgd", "Layout(shard=2)"),
    Cell("borrowing", "sgd", "Layout(shard=2)", 2),
    Cell("sharing", "adamw", "Layout(shard=2, zero=1)"),
    Cell("small", "adamw", "Layout(shard=4)"),
    Cell("sparse", "sgd", "Layout(shard=2)"),
    Cell("experts", "sgd", "Layout(shard=2)"),
    Cell("experts", "sgd", "Layout(context=2)"),
    Cell("choosy", "sgd", "Layout(tensor=2)"),
    Cell("dropped", "adamw", "Layout(shard=2)"),
    Cell("dropped", "sgd", "Layout(context=2)"),
    Cell("dropped", "sgd", "Layout(pipeline=2)"),
    Cell("pictures", "sgd", "Layout(replicate=2)"),
    Cell("lengths", "sgd", "Layout(context=2)"),
    Cell("lengths", "sgd", "Layout(shard=2, pipeline=2)"),
    Cell("padded", "sgd", "Layout(context=2)"),
    Cell("long", "sgd", "Layout(context=2)"),
)
PAIRS = (
    Pair((4, "Layout(tensor=2, pipeline=2)"), (4, "Layout(shard=2)")),
    Pair((2, "Layout(context=2)"), (4, "Layout(pipeline=4)")),
    Pair((2, "Layout(shard=2)"), (2, "Layout(tensor=2)")),
)
