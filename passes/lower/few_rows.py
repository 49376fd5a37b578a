"""Few rows, as in decoding: GEMMs that read their weight once, quantize as they read, and do what follows them.

    parts = fxquant.quantize(x, spec, "rowwise")
    y = fxquant.scaled_mm(parts, weight, ...)
    z = y + residual
    # of one row becomes
    z = fxquant.scaled_mm([x], weight, ..., epilogue="add", other=residual)

GEMMs of a weight that alone is quantized leave nothing to quantize, and are otherwise treated alike.

Only on Hopper, and only where the GEMMs are the sole readers of a quantization, and what follows is the sole reader of
theirs. See `fxquant.kernels.linear.triton_few_rows` and `triton_weight_only`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxquant.compat.device import launches_early
from fxquant.formats import QuantSpec
from fxquant.kernels.linear import few_rows as limits
from fxquant.kernels.linear import weight_only
from fxquant.kernels.linear.choice import GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.passes.graph.builder import erase_unused
from fxquant.passes.graph.considered import allowed
from fxquant.passes.graph.match import behind_views, shaped
from fxquant.passes.graph.names import RESHAPES, is_fxquant
from fxquant.passes.graph.values import val
from fxquant.passes.joint.produced import inputs_of, last_operator
from fxquant.passes.settings import Settings

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


_DECODING = (GemmKernel.FEW_ROWS, GemmKernel.WEIGHT_ONLY, GemmKernel.WEIGHT_ONLY_DIRECT)


def decodes(node: fx.Node) -> bool:
    """Returns True if a kernel that reads the weight once does a GEMM of so few rows faster than cuBLAS."""
    if not is_fxquant(node, "scaled_mm"):
        return False
    arguments: Any = fx.node.map_arg(node.args, val)
    return scaled_mm.choose(scaled_mm.facts_of(*arguments)).kernel in _DECODING


def few_rows(graph: fx.Graph, settings: Settings) -> int:
    """Says what the kernels for few rows take over: quantizing their input, what follows, and reading ahead.

    Those of a package cannot be launched early. Returns how many nodes went away or read ahead.
    """
    if not settings.kernels:
        return 0
    before, count, packaged = len(graph.nodes), 0, settings.portable
    _leave_unquantized(graph, packaged)
    _fuse_epilogues(graph, packaged)
    count += before - len(graph.nodes)
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default):
        if not packaged and launches_early(val(node).device) and decodes(node):
            node.kwargs = {**node.kwargs, "early": True}
            count += 1
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default):
        if not quantizes_few_rows(node):
            continue
        if not packaged and launches_early(val(node.args[0]).device):
            node.kwargs = {"early": True}
            count += 1
        else:
            gemms = _gemms(node)
            weights = [user.args[1][0] for user in graph.nodes if user in gemms]
            if behind_views(weights[0]).op in ("placeholder", "get_attr") and val(weights[0]).is_contiguous():
                node.kwargs = {"ahead": weights[0]}
                count += 1
    return count


def _leave_unquantized(graph: fx.Graph, packaged: bool) -> None:
    """Gives GEMMs the tensor itself, with its multiplier where it has one, to quantize as they read it.

    Only where no one else reads the quantized one.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxquant.quantize.default):
        x, spec, direction, *multiplier = node.args
        gemms = _gemms(node)
        inputs = gemms or {user for user in _readers(node) if user.args[0] == [*node.users]}
        if direction != "rowwise" or not any(map(decodes, inputs)):
            continue
        parsed = QuantSpec.parse(str(spec))
        early = not packaged and launches_early(val(x).device)
        alone = limits.quantizes_itself(val(x), parsed, scaled=bool(multiplier), gemms=len(gemms), early=early)
        reason = "" if alone else "quantizing it once, in a kernel of its own, is faster"
        if allowed(node, _STEP, reason if gemms else "something else than GEMMs of few rows reads it"):
            for user in gemms:
                user.args = ([x, *multiplier], *user.args[1:])
            for item in [*node.users, node]:
                graph.erase_node(item)


def _fuse_epilogues(graph: fx.Graph, packaged: bool) -> None:
    """Gives GEMMs the sum with a residual, or the activation, that is the sole reader of their result."""
    if not any(map(decodes, graph.find_nodes(op="call_function", target=torch.ops.fxquant.scaled_mm.default))):
        return
    for name in limits.EPILOGUES:
        for root in graph.find_nodes(op="call_function", target=_root(name)):
            for gemm, other in _ends_of(name, root):
                if decodes(gemm) and allowed(gemm, _STEP, _no_epilogue(gemm, packaged) or _other_reader(gemm, root)):
                    with graph.inserting_before(root):
                        shape = list(val(gemm).shape)
                        more = {"epilogue": name, **({} if other is None else {"other": shaped(other, shape)})}
                        fused = graph.call_function(gemm.target, gemm.args, more)  # type: ignore[arg-type]
                        fused.meta = dict(gemm.meta)
                        result = shaped(fused, list(val(root).shape))
                    root.replace_all_uses_with(result)
                    erase_unused([root])
                    break


def _root(name: str) -> Any:
    """The last operator of an epilogue, as Inductor has decomposed it."""
    return _aten.add.Tensor if name == "add" else last_operator(name)


def _ends_of(name: str, root: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """The GEMMs that `root` may be an epilogue of, each with the other tensor that it reads."""
    value = val(root)
    ends: list[tuple[Any, Any]] = []
    if name == "add":
        a, b = root.args
        if not root.kwargs and isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b:
            same = all(val(x).shape == value.shape and val(x).dtype == value.dtype for x in (a, b))
            ends = [(a, b), (b, a)] if same and value.dtype in (torch.bfloat16, torch.float16) else []
    elif (inputs := inputs_of(name, root)) is not None:
        ends = [(inputs[-1], inputs[0] if len(inputs) > 1 else None)]
    for end, other in ends:
        gemm = behind_views(end, RESHAPES)
        if is_fxquant(gemm, "scaled_mm") and behind_views(other, RESHAPES) is not gemm:
            yield gemm, other


def _no_epilogue(gemm: fx.Node, packaged: bool) -> str:
    """Returns why a GEMM of few rows takes no epilogue; empty if it does."""
    if gemm.kwargs:
        return "it has an epilogue"
    a, b = ([val(part) for part in parts] for parts in gemm.args[:2])  # type: ignore[union-attr]
    a_spec, b_spec = (QuantSpec.parse(str(text)) for text in gemm.args[2:4])
    if a_spec.is_identity:
        arguments: Any = fx.node.map_arg(gemm.args, val)
        facts = replace(scaled_mm.facts_of(*arguments), launches=not packaged)
        direct = scaled_mm.choose(facts).kernel is GemmKernel.WEIGHT_ONLY_DIRECT
        alone = direct or weight_only.in_one_kernel(a, b, b_spec)
    else:
        alone = limits.in_one_kernel(a, b)
    return "" if alone else "several kernels add up its result"


def _other_reader(gemm: fx.Node, root: fx.Node) -> str:
    """Returns a reason if more than `root` is computed from a GEMM's result; empty if nothing else is."""
    between, todo = {root}, [gemm]
    while todo:
        for user in todo.pop().users:
            if user not in between:
                if user.op == "output" or len(between) > 16:
                    return _READ
                between.add(user)
                todo.append(user)
    needed, todo = {root}, [root]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in between and source not in needed:
                needed.add(source)
                todo.append(source)
    return "" if between == needed else _READ


_STEP = "few_rows"
_READ = "something else than its epilogue reads its result"


def _gemms(node: fx.Node) -> set[fx.Node]:
    """The GEMMs that read a quantization, where nothing else does and `decodes` them all."""
    users = _readers(node)
    alone = all(decodes(user) and user.args[0] == [*node.users] for user in users)
    return users if alone else set()


def _readers(node: fx.Node) -> set[fx.Node]:
    return {user for item in node.users for user in item.users}


def quantizes_few_rows(node: fx.Node) -> bool:
    """Returns True if a quantization is left to a Triton kernel.

    Inductor fuses it with what makes its tensor, at no launch; but an amax of the whole tensor costs one.
    """
    x, text, direction, *multiplier = node.args
    if node.kwargs:
        return True
    spec = QuantSpec.parse(str(text))
    if direction != "rowwise" or not limits.quantizes(val(x)):
        return False
    own_pass = spec.row.family == "per_tensor" and not multiplier
    return bool(_gemms(node)) and (own_pass or not _is_fused(x))


def _is_fused(x: Any) -> bool:
    """Returns True if Inductor makes a tensor in a kernel of its own, into which it can fuse more."""
    x = behind_views(x)
    tags = getattr(x.target, "tags", ())
    return x.op == "call_function" and (torch.Tag.pointwise in tags or x.target is _CONVERT)
