"""Limits on the size of classes and functions; each exception has a reason, and fails when it is not needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "unisono"
LIMITS = {
    "lines of a class": 250,
    "methods": 25,
    "lines of a function": 50,
    "parameters": 8,
    "fields": 12,  # of a dataclass that is not frozen
}
EXCEPTIONS = {
    "horovod/optimizer.py DistributedOptimizer: parameters": "the signature of Horovod",
    "ddp.py DistributedDataParallel.__init__: parameters": "the signature of torch",
    "layout/context/attention.py attend: parameters": "the signature of torch",
    "layout/context/ring_attention.py _backward: parameters": "the signature of torch",
    "layout/pipeline/runtime.py Pipeline: lines of a class": "one step and its schedules share one state",
    "membership/coordinator.py Coordinator: lines of a class": "one state machine",
    "membership/coordinator.py Coordinator: methods": "one state machine",
    "trainer/custom_loop.py CustomLoop: lines of a class": "calls in any order share a step's state",
    "trainer/custom_loop.py CustomLoop: methods": "calls in any order share a step's state",
    "trainer/loop_model.py LoopModel: lines of a class": "a view, its passes and its rounds share one state",
    "trainer/loop_model.py LoopModel: methods": "a view, its passes and its rounds share one state",
    "world.py World: lines of a class": "what a custom loop can call, most of it docstrings",
    "trainer/loop.py Trainer.run: lines of a function": "a step from top to bottom, on one page",
}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(node: ast.AST, outside: str = "") -> Iterator[tuple[str, Definition]]:
    """All classes and functions below `node`, by qualified name."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, Definition)
        name = f"{outside}.{child.name}".lstrip(".") if named else outside
        if named:
            yield name, child
        yield from definitions(child, name)


def lines(node: Definition) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a caller may give, each of ``*args`` and ``**kwargs`` as one."""
    given = node.args
    named = [each.arg for each in (*given.posonlyargs, *given.args)]
    own = named[:1] in (["self"], ["cls"])
    return len(named) - own + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def fields(node: ast.ClassDef) -> int:
    """Of a dataclass whose values can change; 0 of any other class."""
    mutable = any("dataclass" in text and "frozen=True" not in text for text in map(ast.unparse, node.decorator_list))
    return mutable * sum(isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each) for each in node.body)


def sizes(node: Definition) -> dict[str, int]:
    """The figures of a definition that have limits."""
    if isinstance(node, ast.ClassDef):
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        return {"lines of a class": lines(node), "methods": len(methods), "fields": fields(node)}
    return {"lines of a function": lines(node), "parameters": parameters(node)}


@cache
def above() -> dict[str, int]:
    """What is above its limit, by file, qualified name and limit."""
    return {
        f"{path.relative_to(SOURCE)} {name}: {limit}": size
        for path in sorted(SOURCE.rglob("*.py"))
        for name, node in definitions(ast.parse(path.read_text()))
        for limit, size in sizes(node).items()
        if size > LIMITS[limit]
    }


def test_nothing_is_above_its_limit_but_the_exceptions() -> None:
    assert {key: size for key, size in above().items() if key not in EXCEPTIONS} == {}


def test_every_exception_is_still_needed() -> None:
    assert [key for key in EXCEPTIONS if key not in above()] == []


def test_the_figures_are_what_they_are_called() -> None:
    source = """
@dataclass
class A:
    kinds: ClassVar[int] = 1
    x: int
    y: int
    def f(self, a, /, b, *args, c, **kwargs):
        return a
"""
    found = dict(definitions(ast.parse(source)))
    assert sizes(found["A"]) == {"lines of a class": 6, "methods": 1, "fields": 2}
    assert sizes(found["A.f"]) == {"lines of a function": 2, "parameters": 5}
