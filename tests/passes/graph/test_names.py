"""One vocabulary of the operators that move elements, for both dialects of graphs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxquant.passes
from fxquant.compat.private import make_fx
from fxquant.passes.graph import names
from fxquant.passes.graph.names import calls, is_fxquant, op_name

FOLDER = Path(fxquant.passes.__file__).parent
CLASSES = {
    name: getattr(names, name)
    for name in "RESHAPES UNIT_AXES EXCHANGES MATRIX_TRANSPOSES REVERSALS COPIES ALIASES DETACHES CASTS REINTERPRETS "
    "EXPANDS SLICES SPLITS PICKS GATHERS".split()
}
MOVING = names.VIEWS | names.COPIES | names.EXPANDS | names.SPLITS | names.PICKS
ALIKE = (
    names.RESHAPES | names.UNIT_AXES, names.ORDERS, names.COPIES, names.DETACHES, names.CASTS, names.REINTERPRETS,
    names.EXPANDS, names.SLICES, names.SPLITS, names.PICKS, names.GATHERS,
)  # fmt: skip
"""Classes between which no decomposition of torch goes."""


def named(node: ast.AST) -> set[str]:
    """The operators that a literal lists: names in strings, and overloads of ATen."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        text = node.func.value
        return set(text.value.split()) if isinstance(text, ast.Constant) and isinstance(text.value, str) else set()
    found = set()
    items = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else []
    if isinstance(node, ast.Dict) and not all(isinstance(value, ast.Name) for value in node.values):
        items = node.keys  # but not of a table of readers by name
    for item in items:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            found.add(item.value)
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Attribute):
            found.add(item.value.attr)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_tables_of_views_are_in_one_file(path: Path) -> None:
    tables = [named(node) & MOVING for node in ast.walk(ast.parse(path.read_text()))]
    if path != FOLDER / "graph" / "names.py":
        assert not [table for table in tables if len(table) > 1]
    else:
        assert len([table for table in tables if len(table) > 1]) > 5


def test_the_classes_are_disjoint() -> None:
    for (one, first), (other, second) in combinations(CLASSES.items(), 2):
        assert not first & second or {one, other} == {"RESHAPES", "STRICT_RESHAPES"}, (one, other)
    assert names.ORDERS > names.EXCHANGES | names.MATRIX_TRANSPOSES | names.REVERSALS
    assert names.SAME_VALUES > names.SAME_ELEMENTS and names.SAME_VALUES > names.SAME_PLACES


@pytest.mark.parametrize("name", sorted(frozenset().union(*CLASSES.values(), names.ORDERS) - {"view_dtype"}))
def test_every_name_is_an_operator(name: str) -> None:
    assert any(hasattr(place, name) for place in (torch, Tensor, torch.ops.aten, operator)), name


def node_of(call: Callable[..., Any], *args: Any) -> fx.Node:
    return fx.Graph().call_function(call, args)


SPELLINGS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(4, 6),
    "reshape": lambda x: x.reshape(4, 6),
    "view_as": lambda x: x.view_as(torch.empty(4, 6)),
    "reshape_as": lambda x: x.reshape_as(torch.empty(4, 6)),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(0, (1, 2)),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "transpose": lambda x: x.transpose(0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 2),
    "moveaxis": lambda x: x.moveaxis(0, 2),
    "adjoint": lambda x: x.adjoint(),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "T": lambda x: x[0].T,
    "H": lambda x: x[0].H,
    "t": lambda x: x[0].t(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.mT.contiguous(),
    "detach": lambda x: x.detach(),
    "to": lambda x: x.to(torch.float64),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(torch.empty(1, dtype=torch.float64)),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
    "expand": lambda x: x.expand(5, 2, 3, 4),
    "expand_as": lambda x: x.expand_as(torch.empty(5, 2, 3, 4)),
    "broadcast_to": lambda x: x.broadcast_to(5, 2, 3, 4),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "select": lambda x: x.select(0, 1),
    "take_along_dim": lambda x: x.take_along_dim(torch.zeros(2, 3, 4, dtype=torch.int64), 0),
    "index_select": lambda x: x.index_select(0, torch.tensor([1])),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_operator_is_in_one_class_in_both_dialects(name: str) -> None:
    captured = name == "detach"  # decompositions, and since torch 2.14 every trace below autograd, make it an alias
    graph = make_fx(SPELLINGS[name], pre_dispatch=captured)(torch.empty(2, 3, 4)).graph
    *_, last = (node for node in graph.nodes if node.op == "call_function")
    (alike,) = [cls for cls in ALIKE if name in cls]
    assert calls(last, alike), f"{name} is {op_name(last)}"


@pytest.mark.parametrize("table", ["VIEWS", "SAME_ELEMENTS", "SAME_VALUES"])
def test_a_table_with_detaches_has_the_aliases_that_they_become(table: str) -> None:
    assert getattr(names, table) > names.DETACHES | names.ALIASES


def test_one_operator_has_one_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("view")
    spellings = [
        graph.call_method("transpose", (x, 0, 1)),
        graph.call_function(torch.transpose, (x, 0, 1)),
        graph.call_function(torch.ops.aten.transpose, (x, 0, 1)),
        graph.call_function(torch.ops.aten.transpose.int, (x, 0, 1)),
    ]
    assert {op_name(node) for node in spellings} == {"transpose"}
    assert op_name(graph.call_function(getattr, (x, "mT"))) == "mT"
    assert op_name(graph.call_function(torch.ops.fxquant.amax.default, (x,))) == "fxquant::amax"
    assert all(calls(node, names.EXCHANGES) for node in spellings)
    assert not calls(x, names.RESHAPES) and not calls("view", names.RESHAPES)


def test_a_view_of_bytes_is_no_reshape() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    spellings = (
        graph.call_method("view", (x, torch.uint8)),
        graph.call_function(torch.ops.aten.view.dtype, (x, torch.uint8)),
    )
    for node in spellings:
        assert calls(node, names.REINTERPRETS) and not calls(node, names.VIEWS)
    assert calls(graph.call_method("view", (x, [4])), names.RESHAPES)


def test_operators_of_fxquant() -> None:
    x = fx.Graph().placeholder("x")
    packet, overload = torch.ops.fxquant.amax, torch.ops.fxquant.amax.default
    for target in (packet, overload):
        node = node_of(target, x)
        assert is_fxquant(node) and is_fxquant(node, "amax") and not is_fxquant(node, "quantize")
    assert not is_fxquant(node_of(torch.ops.aten.amax.default, x)) and not is_fxquant(node_of(torch.amax, x), "amax")
