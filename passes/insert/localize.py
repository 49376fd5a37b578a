"""Writes products of tensors that are spread over a mesh (DTensors) as products of the parts that a rank holds.

    linear = torch._C._nn.linear(x, w, b)                # x "R", w "S0", b "S0"; torch has said: linear "S2"
    # becomes
    x_part = local_part(x, "R", "P")                     # the gradient of x is a sum over the ranks
    w_part = local_part(w, "S0", "S0")
    b_part = local_part(b, "S0", "S0")
    linear = torch._C._nn.linear(x_part, w_part, b_part)
    whole = spread_out(linear, x, "S2")

torch has decided how the result is placed; that says, dimension by dimension of the mesh, what the operands must be. A
part of an axis of the result comes from the same part of the operands that have this axis, and from all of the others,
whose gradients are then addends; addends of the result come from parts of what is contracted. Operands that are placed
otherwise are redistributed, as torch would do. Where that is no rule for a product it stays, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fxquant.compat.inside.placements import is_spread, local_part, mesh_sizes, placements_text, spread_out
from fxquant.compat.values import on_fakes
from fxquant.passes.find.facts import Contraction, Label
from fxquant.passes.find.forms import FORMS, form_name, read_form
from fxquant.passes.find.site import Site
from fxquant.passes.graph.builder import Builder
from fxquant.passes.graph.meta import EXAMPLE_VALUE, UNPLACED, inherited
from fxquant.passes.graph.values import Dim, maybe_value, value_of

SMALLEST = 16
"""The smallest part of an axis for which ranks may hold parts of different sizes: smaller ones are not quantized."""


class _Unplaced(Exception):
    """The reason why a product is not written as one of local parts."""


@dataclass(frozen=True)
class _Axes:
    """The labels of an operand's axes, its placements now, and whether it is added to the product."""

    labels: tuple[Label, ...]
    placed: Sequence[str]
    added: bool = False

    def part(self, label: Label, otherwise: str) -> str:
        """Returns the placement as a part of an axis; the other one for an operand that has no such axis."""
        return f"S{self.labels.index(label)}" if label in self.labels else otherwise


def localize(graphs: Sequence[fx.GraphModule]) -> int:
    """Rewrites graphs in place; returns how many products were rewritten."""
    count = 0
    for module in graphs:
        calls: dict[object, fx.Node] = {}
        for node in list(module.graph.nodes):
            if form_name(node) in FORMS and any(is_spread(maybe_value(x)) for x in node.all_input_nodes):
                try:
                    _rewrite(node, calls)
                    count += 1
                except _Unplaced as reason:
                    node.meta[UNPLACED] = str(reason)
    return count


def _rewrite(node: fx.Node, calls: dict[object, fx.Node]) -> None:
    whole = value_of(node)
    contraction, operands = _operands(node)
    result = _text(node)
    _check_sizes(node, contraction, operands, result)
    wanted = {x: _wanted(contraction, axes, operands, result) for x, axes in operands.items()}
    builder = Builder(node, calls)
    shape = [_size(builder, contraction, label) for label in contraction.out]
    parts = {x: builder.call(local_part, x, *texts) for x, texts in wanted.items()}
    like = next(iter(operands))
    node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: parts.get(x, x))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    with on_fakes(args, kwargs):
        call = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        node.meta[EXAMPLE_VALUE] = call(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
    with node.graph.inserting_after(node):
        back = node.graph.call_function(spread_out, (node, like, " ".join(result), shape))
    back.meta = {**inherited(node), EXAMPLE_VALUE: whole}
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _size(builder: Builder, contraction: Contraction, label: Label) -> int | fx.Node:
    operand = contraction.left if label in contraction.left.labels else contraction.right
    return builder.size(operand.node, operand.labels.index(label))


def _operands(node: fx.Node) -> tuple[Contraction, Mapping[fx.Node, _Axes]]:
    """Returns the axes of a product of two tensors, and those of everything that it reads."""
    form = form_name(node)
    tensors = [x for x in node.all_input_nodes if isinstance(maybe_value(x), Tensor)]
    for x in tensors:
        if not is_spread(value_of(x)):
            raise _Unplaced(f"{x.name} is on this rank alone, beside tensors that are spread over a mesh")
        if value_of(x).device_mesh != value_of(node).device_mesh:
            raise _Unplaced(f"{x.name} is on another mesh")
    if (form.endswith("_") and not form.endswith("__")) or "out" in node.kwargs:
        raise _Unplaced(f"{form} writes into its operand")
    match = read_form(Site(node=node, outer={}), form, tensors)
    contraction = None if match is None else match.contraction
    if contraction is None or contraction.left.view or contraction.right.view:
        raise _Unplaced(match.skip[1] if match and match.skip else f"{form} is not one product of two tensors")
    if contraction.left.node is contraction.right.node:
        raise _Unplaced(f"both operands are {contraction.left.node.name}")
    operands = {x.node: _Axes(x.labels, _text(x.node)) for x in (contraction.left, contraction.right)}
    for x in tensors:
        if x not in operands:
            shape = value_of(x).shape
            labels = contraction.out[len(contraction.out) - len(shape) :]
            repeats = [isinstance(size, int) and size == 1 for size in shape]
            kept = (None if one else label for one, label in zip(repeats, labels, strict=True))
            operands[x] = _Axes(tuple(kept), _text(x), added=True)
    return contraction, operands


def _text(node: fx.Node) -> list[str]:
    text = placements_text(value_of(node))
    if text is None:
        raise _Unplaced(f"{node.name} is placed as {', '.join(map(str, value_of(node).placements))}")
    return text.split()


def _wanted(
    contraction: Contraction, axes: _Axes, operands: Mapping[fx.Node, _Axes], result: Sequence[str]
) -> tuple[str, str]:
    """Returns the placements of an operand for a result that is placed like this, and those of its gradient."""
    pairs = []
    for dim, item in enumerate(result):
        if item == "R":
            pairs.append(("R", "R"))
        elif item == "P":
            inner = axes.part(_contracted(contraction, operands, dim), "P")
            pairs.append(("P", "R") if axes.added else (inner, inner))
        else:
            label = contraction.out[int(item[1:])]
            pairs.append((axes.part(label, "R"), axes.part(label, "P")))
    placements, gradient = zip(*pairs, strict=True)
    return " ".join(placements), " ".join(gradient)


def _contracted(contraction: Contraction, operands: Mapping[fx.Node, _Axes], dim: int) -> Label:
    """Returns the contracted axis of which the ranks along a dimension of the mesh hold parts, or shall."""
    sides = [operands[x.node] for x in (contraction.left, contraction.right)]
    labels = {axes.labels[int(axes.placed[dim][1:])] for axes in sides if axes.placed[dim].startswith("S")}
    if len(labels) > 1 or not labels <= set(contraction.inner):
        raise _Unplaced("the result is a sum over ranks that hold no parts of one contracted axis")
    return labels.pop() if labels else contraction.inner[-1]


def _check_sizes(
    node: fx.Node, contraction: Contraction, operands: Mapping[fx.Node, _Axes], result: Sequence[str]
) -> None:
    """Raises where parts differ in their sizes so that ranks would decide differently about this product."""
    counts: dict[Label, int] = {}
    for dim, (item, ranks) in enumerate(zip(result, mesh_sizes(value_of(node)), strict=True)):
        if item != "R":
            label = _contracted(contraction, operands, dim) if item == "P" else contraction.out[int(item[1:])]
            counts[label] = counts.get(label, 1) * ranks
    for label, ranks in counts.items():
        operand = contraction.left if label in contraction.left.labels else contraction.right
        size: Dim = operand.size(label)
        if isinstance(size, int) and size % ranks:
            most = -(-size // ranks)
            smallest = size - most * (ranks - 1)
            if smallest < (1 if label in contraction.rows else SMALLEST):
                raise _Unplaced(f"{ranks} ranks have parts of {size}, of which the last has {max(smallest, 0)}")
