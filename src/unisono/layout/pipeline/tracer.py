"""A torch.fx tracer with values: questions of the model's own code about sizes are answered while tracing.

Every proxy has its value on the sample. A condition on sizes (is the sequence too long?) takes the sample's branch, and
the graph gets a check that later micro-batches take it too. A condition on values of tensors cannot be traced.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, TraceError

from unisono.errors import InvalidInput

# Functions of torch that take sizes and no tensor, so that torch would not dispatch them to a proxy.
_FACTORIES = (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn,
           torch.zeros)  # fmt: skip


def check_same_answer(found: Any, on_sample: Any) -> None:
    """Check, as a node of the graph, that a question about sizes has the same answer as on the sample.

    Raises:
        InvalidInput: the answers differ.
    """
    if found != on_sample:
        raise InvalidInput(
            "pipeline", found, "the model's code branches on a size, which differs in this micro-batch from the sample "
            f"by which the model was cut into stages, where the answer was {on_sample}",
            "give micro-batches of one shape, write the model as nn.Sequential, or use pipeline=1")  # fmt: skip


class Tracer(fx.Tracer):
    """A tracer that calls every module as a whole, except the `opened` ones.

    Args:
        given: the arguments of the model's forward, by name, defaults included.
    """

    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[str], given: Mapping[str, Any]) -> None:
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)
        self._opened, self._given, self._inside = opened, given, False
        self.values: dict[fx.Node, Any] = {}
        self._python, self._torch = random.getstate(), torch.get_rng_state()

    @property
    def drew_random(self) -> bool:
        """Whether the code has drawn random numbers outside of the graph."""
        return random.getstate() != self._python or not torch.equal(torch.get_rng_state(), self._torch)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._inside else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._inside else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ValueProxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        self.values[proxy.node] = self._value(proxy.node)
        return proxy

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.answer(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        parts: Any = obj
        return iter([parts[place] for place in range(self.answer(obj, len))])

    def answer(self, obj: fx.Proxy, ask: Callable[[Any], Any]) -> Any:
        """The result of `ask` for the value of `obj`; the graph refuses micro-batches with another result."""
        value = self.values[obj.node]
        if isinstance(value, Tensor) and ask is not len:
            raise TraceError("control flow depends on the values of a tensor")
        found = ask(value)
        if not any(
            isinstance(self.values[n], torch.device) for n in obj.node.all_input_nodes
        ):  # devices differ between meta and real runs
            asked = obj if ask is bool else self.create_proxy("call_function", ask, (obj,), {})
            self.create_proxy("call_function", check_same_answer, (asked, found), {})
        return found

    def _value(self, node: fx.Node) -> Any:
        """The value of the node on the sample."""
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        before, self._inside = self._inside, True
        python, generator = random.getstate(), torch.get_rng_state()
        try:
            match node.op:
                case "placeholder":
                    return self._given.get(str(node.target).lstrip("*"))
                case "get_attr":
                    owner, _, leaf = str(node.target).rpartition(".")
                    return getattr(self.root.get_submodule(owner), leaf)
                case "call_module":
                    return self.root.get_submodule(str(node.target))(*args, **kwargs)
                case "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                case _:
                    assert callable(node.target)
                    return node.target(*args, **kwargs)
        finally:
            self._inside = before
            random.setstate(python)
            torch.set_rng_state(generator)


class _ValueProxy(fx.Proxy):
    """A proxy that answers questions about its value."""

    def __getattr__(self, k: str) -> Attribute:
        return _ValueAttribute(self, k)

    def __len__(self) -> int:
        return int(self.tracer.answer(self, len))  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.tracer.answer(self, int))  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.tracer.answer(self, float))  # type: ignore[attr-defined]

    def __index__(self) -> int:
        return int(self.tracer.answer(self, operator.index))  # type: ignore[attr-defined]


class _ValueAttribute(Attribute, _ValueProxy):
    """An attribute of a `_ValueProxy`."""
