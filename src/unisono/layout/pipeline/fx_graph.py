"""A model's forward as a graph of calls to its units (torch.fx), divided into one graph per stage.

Between units the model's own code becomes graph nodes, so what crosses a cut is known exactly: residual streams,
several tensors, connections that skip stages. Values that depend only on the model's inputs (positions, masks, sizes)
are not sent, but computed on every stage that uses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from unisono.layout.pipeline.tracer import Tracer, check_same_answer

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal")


class Untraceable(Exception):
    """The model's code cannot be written as a graph; the message gives the reason."""


@dataclass
class Chain:
    """A traced model: nodes in order of execution, and the names of those that are tensors on the sample."""

    model: nn.Module
    graph: fx.Graph
    tensors: set[str]

    @property
    def conditional(self) -> bool:
        """Whether the graph is valid only for micro-batches that take the sample's branches."""
        return any(n.target is check_same_answer for n in self.graph.nodes)

    @property
    def units(self) -> list[str]:
        """Names of the called modules with parameters, in order of their first call."""
        called = [n.target for n in self.graph.nodes if n.op == "call_module"]
        return list(dict.fromkeys(u for u in called if any(True for _ in self.model.get_submodule(u).parameters())))


def trace(model: nn.Module, opened: Collection[str], inputs: Mapping[str, Any]) -> Chain:
    """The model as a chain of its units: every module but the `opened` ones is called as a whole.

    Raises:
        Untraceable: the model's own code depends on values or on the mode, or torch.fx cannot follow it.
    """
    graph, tensors = _graph(model, opened, inputs)
    mode = model.training
    if all(m.training == mode for m in model.modules()):  # else the model has no single other mode
        model.train(not mode)
        try:
            other, _ = _graph(model, opened, inputs)
        finally:
            model.train(mode)
        if str(other) != str(graph):
            raise Untraceable("its own code differs between training and evaluation")
    return Chain(model, graph, tensors)


def _graph(model: nn.Module, opened: Collection[str], inputs: Mapping[str, Any]) -> tuple[fx.Graph, set[str]]:
    """The graph, and the names of the nodes that are tensors."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if name not in inputs and parameter.default is not inspect.Parameter.empty
    }
    constants = {name: value for name, value in inputs.items() if value is None or isinstance(value, bool | int | str)}
    tracer = Tracer(opened, {**defaults, **inputs})
    try:
        with torch.no_grad():
            graph = tracer.trace(model, {**defaults, **constants})
    except Exception as error:  # of the tracer, or of code that rejects proxies
        raise Untraceable(f"torch.fx cannot follow its code: {error}") from error
    if tracer.drew_random:
        raise Untraceable("its own code draws random numbers, which a graph does not record")
    for node in list(graph.nodes):
        node.meta.pop("is_wrapped", None)  # else generated code makes fx wrap functions of torch for ever
        if node.op == "placeholder" and node.target not in inputs:
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
    return graph, {node.name for node in graph.nodes if isinstance(tracer.values.get(node), Tensor)}


class Division:
    """The division of a chain into stages: stage k + 1 begins at the call of ``cuts[k]``.

    Raises:
        Untraceable: a value that is not a tensor crosses a cut, or a cut is not called after the previous cut.
    """

    def __init__(self, chain: Chain, cuts: Sequence[str]) -> None:
        self.chain, self.count = chain, len(cuts) + 1
        self.home = _stage_of_nodes(chain.graph, cuts)
        self.free = _from_inputs(chain)
        self.uses: list[set[fx.Node]] = [set() for _ in range(self.count)]  # nodes that a stage computes or receives
        for node in chain.graph.nodes:
            if node.op != "placeholder" and node.op != "get_attr":
                self._need(node, self.home[node])
        self.crossing = [self._crosses(cut) for cut in range(1, self.count)]

    def _need(self, node: fx.Node, stage: int) -> None:
        if node in self.uses[stage]:
            return
        self.uses[stage].add(node)
        if self.computes(node, stage):
            for needed in node.all_input_nodes:
                self._need(needed, stage)
        elif node.name not in self.chain.tensors:
            raise Untraceable(f"{node.name}, which is not a tensor, would cross the cut into stage {stage}")

    def computes(self, node: fx.Node, stage: int) -> bool:
        """Whether a stage that needs `node` computes it instead of receiving it."""
        if self.home[node] == stage or node.op in ("placeholder", "get_attr") or node in self.free:
            return True
        return node.name not in self.chain.tensors and node.op in ("call_function", "call_method")

    def _crosses(self, cut: int) -> list[fx.Node]:
        """Nodes that are computed before the cut and received by a stage after it."""
        later = {n for stage in range(cut, self.count) for n in self.uses[stage] if not self.computes(n, stage)}
        return [n for n in self.chain.graph.nodes if n in later and self.home[n] < cut]

    def stage_graph(self, stage: int) -> fx.GraphModule:
        """The graph of one stage, on the model's own modules and parameters."""
        received = self.crossing[stage - 1] if stage else []
        sent = self.crossing[stage] if stage < self.count - 1 else []
        graph, env = fx.Graph(), {}
        for node in received:
            env[node] = graph.placeholder(f"arrived_{node.name}")
        for node in self.chain.graph.nodes:
            if node.op == "placeholder":
                env[node] = graph.node_copy(node)
            elif node.op == "output":
                if stage == self.count - 1:
                    graph.node_copy(node, lambda n: env[n])
            elif node not in env and node in self.uses[stage]:
                env[node] = graph.node_copy(node, lambda n: env[n])
        if stage < self.count - 1:
            graph.output(tuple(env[n] for n in sent))
        return fx.GraphModule(self.chain.model, graph)


def _stage_of_nodes(graph: fx.Graph, cuts: Sequence[str]) -> dict[fx.Node, int]:
    home: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        if node.op == "call_module" and stage < len(cuts) and _is_inside(str(node.target), cuts[stage]):
            stage += 1
        home[node] = stage
    if stage < len(cuts):
        after = f" after {cuts[stage - 1]}" if stage else ""
        raise Untraceable(f"the forward pass does not call {cuts[stage]}{after}")
    return home


def _is_inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _from_inputs(chain: Chain) -> set[fx.Node]:
    """Nodes that depend only on the model's inputs and buffers, by stateless functions."""
    free: set[fx.Node] = set()
    for node in chain.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and not _is_parameter(chain.model, str(node.target))):
            free.add(node)
        elif node.op in ("call_function", "call_method") and all(n in free for n in node.all_input_nodes):
            name = str(getattr(node.target, "__name__", node.target))
            if not name.endswith("_") and not any(word in name for word in _RANDOM):
                free.add(node)
    return free


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return isinstance(getattr(model.get_submodule(owner), leaf, None), nn.Parameter)
