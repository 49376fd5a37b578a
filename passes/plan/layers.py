"""Names the layer of every match by the module path that users know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from fxquant.compat.private import source_text
from fxquant.passes.find.facts import Match, Product
from fxquant.passes.find.weights import find_weight
from fxquant.passes.graph.meta import FORWARD_MODULE_STACK, LAYER, MODULE_STACK, PROJECTION, STACK_TRACE

_ROOT = re.compile(r"^(L\['fn'\]\.(args|keywords)\['?\w+'?\]|[LG]\['[^']*'\](\[\d+\])?)\.?")  # also of a partial
_HOLDERS = re.compile(r"^((__closure__\.\d+\.cell_contents|(func\.)?__self__|__wrapped__)(\.|$))+")
_ATTRIBUTE = re.compile(r"((^|\.)_(parameters|buffers))?(^|\.)[^.]+$")
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def clean_path(path: str) -> str:
    """Returns a path without Dynamo's spelling: ``layers.0.mlp`` for ``L['self'].layers._modules['0'].mlp``."""
    while (inner := re.sub(r"getattr\((.*?), ['\"]([^'\"]+)['\"]\)", r"\1.\2", path)) != path:
        path = inner
    path = _ROOT.sub("", path)
    # modules that look up attributes in a way of their own, such as those of PEFT, are read from their __dict__
    path = re.sub(r"\.?(__dict__\['_modules'\]|\b_modules)(?=\[)", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return _WRAPPERS.sub("", _HOLDERS.sub("", path.strip("."))).strip(".")


def layer_name(node: fx.Node, names: Mapping[str, str]) -> str:
    """Returns the path of the innermost module that a node was called in.

    `names` maps ``str(id(module))`` to the path in the user's model, and wins: after a graph break the captured paths
    start at an inner module. The empty string's is that of the module whose method was captured.
    """
    stack = node.meta.get(MODULE_STACK) or node.meta.get(FORWARD_MODULE_STACK) or {}
    for key, (path, _) in reversed(stack.items()):
        users_name = names.get(str(key).partition("@")[0])
        name = clean_path(path) if users_name is None else users_name
        return name or str(node.meta.get(LAYER, ""))
    return str(node.meta.get(LAYER, "")) or names.get("", "")


def has_module(node: fx.Node, names: Mapping[str, str]) -> bool:
    """Returns True if a node was called in a module that `names` has; the model itself is one, whose path is empty."""
    stack = node.meta.get(MODULE_STACK) or node.meta.get(FORWARD_MODULE_STACK) or {}
    return str(next(reversed(stack), "")).partition("@")[0] in names


def line_of(node: fx.Node) -> str:
    """Returns the file and line of the user's that called a node; empty if they are not known."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in ', node.meta.get(STACK_TRACE) or "")
    return ":".join(lines[-1]) if lines else ""


def name_layers(matches: Sequence[Match], names: Mapping[str, str]) -> list[Match]:
    """Returns the matches with the names of their layers."""
    return [replace(match, name=_name(match, names)) for match in matches]


def _name(match: Match, names: Mapping[str, str]) -> str:
    if match.name or PROJECTION in match.node.meta:
        parts = (match.name or layer_name(match.node, names), match.node.meta.get(PROJECTION, ""))
        return ".".join(filter(None, parts))
    layer = layer_name(match.node, names)
    return _holder(match, layer, names) or layer


def _holder(match: Match, layer: str, names: Mapping[str, str]) -> str:
    """Returns the path of the module inside a layer that holds a product's weight; empty if there is none.

    torch sees no call of a module whose `forward` is called, as in ``self.up.forward(x)``, or whose weight is read.
    """
    path = _ATTRIBUTE.sub("", clean_path(match.source))
    users_names = frozenset(names.values())
    for holder in {".".join(filter(None, (names.get("", ""), path))): None, path: None} if path else ():
        inside = not layer or holder.startswith(f"{layer}.")
        if inside and "parametrizations" not in holder and (holder in users_names or not names):
            return holder
    return ""


def product_name(product: Product, layer: str) -> str:
    """Returns the name of a product's weight in its layer, such as ``gate_up_proj``; empty where it is not known."""
    weight = find_weight(product.rhs, {}) if product.rhs_is_weight else None
    if weight is None:
        return ""
    source = source_text(weight.parameter)
    if source:
        return clean_path(source).rpartition(".")[2]
    prefix = "_".join(["p", *filter(None, layer.split("."))]) + "_"  # torch.export's spelling
    return weight.parameter.name.removeprefix(prefix) if weight.parameter.name.startswith(prefix) else ""
