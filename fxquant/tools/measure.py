"""`fxquant.measure`: the errors of quantized products against unquantized ones of the same tensors, by layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.backend.backend import Backend, compile_eager
from fxquant.backend.options import check_model
from fxquant.checks import checked
from fxquant.compat.private import tree_leaves
from fxquant.errors import ArgumentError, OptionError
from fxquant.formats import IDENTITY, AttentionSpec, QuantSpec
from fxquant.kernels.attention import reference as attention_reference
from fxquant.kernels.cast import reference
from fxquant.kernels.custom import watched, watched_gemm
from fxquant.kernels.grouped import reference as grouped_reference
from fxquant.kernels.grouped.high_precision import multiply_groups
from fxquant.passes.graph.meta import layer_of
from fxquant.passes.graph.names import is_fxquant
from fxquant.recipes import Recipe
from fxquant.report.data import Loss
from fxquant.report.report import Report
from fxquant.tools.calls import called_with


class _Measurer(Backend):
    """Runs the rewritten graphs operator by operator, and each product once more without quantization."""

    tells = False
    switches = False

    def __init__(self, recipe: Recipe | str, model: nn.Module | None) -> None:
        super().__init__(recipe, inner="aot_eager", model=model)
        self.losses: list[Loss] = []

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            return lambda *inputs: _Run(graph_module, self.losses).run(*inputs)

        with watched():
            return compile_eager(gm, example_inputs, inner)


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, losses: list[Loss]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.losses = losses

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if is_fxquant(n, "scaled_mm"):
            self._linear(n, result)
        elif n.target is watched_gemm.target:
            self._own(n)
        elif is_fxquant(n, "grouped_scaled_mm"):
            self._experts(n, result)
        elif is_fxquant(n, "attention_forward"):
            self._attention(n, result)
        return result

    def _linear(self, node: fx.Node, result: Tensor) -> None:
        args, _ = self.fetch_args_kwargs_from_env(node)
        seen = [reference.dequantize(*side) for side in zip(args[:2], map(QuantSpec.parse, args[2:4]), strict=True)]
        left, right = self._unquantized(node, seen)
        exact = left @ right.mT
        exact = exact if args[4] is None else exact + args[4]
        self._add(node, "linear", result, exact, {"input": (left, seen[0]), "weight": (right, seen[1])})

    def _own(self, node: fx.Node) -> None:
        """Measures a product of a user's quantizer."""
        (result, bias, *pairs), _ = self.fetch_args_kwargs_from_env(node)
        (left, seen_left), (right, seen_right) = ([x.float() for x in pair] for pair in pairs)
        inner = min(left.shape[-1], right.shape[-1])
        exact = left[..., :inner] @ right[..., :inner].mT
        exact = exact if bias is None else exact + bias
        self._add(node, "linear", result, exact, {"input": (left, seen_left), "weight": (right, seen_right)})

    def _experts(self, node: fx.Node, result: Tensor) -> None:
        args, _ = self.fetch_args_kwargs_from_env(node)
        offs: Tensor | None = args[2]
        sides = zip(args[:2], (offs, None), map(QuantSpec.parse, args[3:5]), strict=True)
        seen = [grouped_reference.dequantize(*side, "rowwise") for side in sides]
        left, right = self._unquantized(node, seen)
        exact = multiply_groups(left, right, offs)
        rows = slice(None if offs is None else int(offs[-1]))  # later rows belong to no group
        pairs = {"input": (left[rows], seen[0][rows]), "weight": (right, seen[1])}
        self._add(node, "experts", result[rows], exact[rows], pairs)

    def _unquantized(self, node: fx.Node, seen: Sequence[Tensor]) -> list[Tensor]:
        """The operands of a product, float32 [*, M, K] and [*, N, K]; `seen` are its own, with K padded."""
        sources = [self._source(parts) for parts in node.args[:2]]
        operands = [x if source is None else source.float() for x, source in zip(seen, sources, strict=True)]
        inner = min(x.shape[-1] for x in operands)
        return [x[..., :inner] for x in operands]

    def _attention(self, node: fx.Node, result: Sequence[Tensor]) -> None:
        args, _ = self.fetch_args_kwargs_from_env(node)
        spec, width = AttentionSpec.parse(args[6]), args[7]
        groups = attention_reference.heads_of(args[0][0]) // attention_reference.heads_of(args[1][0])
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parts, nodes in zip("qkv", args[:3], node.args[:3], strict=True):
            source = self._source(nodes)
            size = (args[1][0].shape[-2], args[2][0].shape[-2]) if source is None else source.shape[-2:]
            shared = groups if name == "q" else 1
            seen = attention_reference.dequantize_heads(parts, spec.qkv, shared, name == "v", size)
            pairs[name] = (seen if source is None else source, seen)
        q, k, v = ([source.float()] for source, _ in pairs.values())
        plain = spec.each(lambda _: IDENTITY)
        exact, *_ = attention_reference.forward(q, k, v, args[3], args[4], None, plain, width, torch.float32)
        self._add(node, "attention", result[0], exact, pairs)

    def _source(self, parts: Any) -> Tensor | None:
        """The tensor that was quantized into `parts`, as it is multiplied; None if it is not in this graph."""
        payload = parts[0]
        if payload.target is not operator.getitem or not isinstance(payload.args[0], fx.Node):
            return None
        cast, place = payload.args
        if is_fxquant(cast, "quantize_qkv"):
            q_k_or_v: Tensor = self.env[cast.all_input_nodes[place // 2]]
            return q_k_or_v
        if not is_fxquant(cast, "quantize", "hybrid_quantize", "quantize_heads", "split_quantize"):
            return None
        source: Tensor = self.env[cast.all_input_nodes[0]]
        column = place > 1 if is_fxquant(cast, "hybrid_quantize") else "columnwise" in cast.args
        return source.mT if column else source

    def _add(
        self, node: fx.Node, what: str, result: Tensor, exact: Tensor, pairs: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        error = (result.float() - exact).norm() / exact.norm().clamp_min(1e-30)
        lost = {name: _lost(*pair) for name, pair in pairs.items()}
        spread = {name: _spread(source) for name, (source, _) in pairs.items()}
        self.losses.append(Loss(layer=layer_of(node), what=what, error=error.item(), lost=lost, spread=spread))


def _spread(source: Tensor) -> tuple[float, float]:
    """The root of the mean square, and the amax."""
    x = source.float()
    return (x.square().mean().sqrt().item(), x.abs().amax().item()) if x.numel() else (0.0, 0.0)


def _lost(source: Tensor, seen: Tensor) -> float:
    """The share of elements that are not zero and become zero."""
    seen = seen[..., : source.shape[-1]]
    return ((source != 0) & (seen == 0)).float().mean().item()


@checked(
    ArgumentError,
    called="fxquant.measure",
    takes={
        "model": "a module or a function",
        "recipe": 'a name, such as fxquant.measure(model, "mxfp8", x), or a Recipe',
    },
)
def measure(model: Any, recipe: Recipe | str, *args: Any, **kwargs: Any) -> Report:
    """Runs `model(*args, **kwargs)` under `recipe` without gradients, and reports the losses of each product.

    For every quantized linear, experts and attention `Report.losses` has the error of its result against the float32
    one of the same tensors, relative in the norm, and of each operand the share of the elements that became zero, the
    root of its mean square and its amax. The
    sizes and values of the example count. Operators run one by one, far slower than the compiled model. Raises
    OptionError for what is no model, and for tensors on the meta device.
    """
    check_model(model, "measured")
    tensors = [*(model.parameters() if isinstance(model, nn.Module) else ()), *tree_leaves((args, kwargs))]
    if any(isinstance(x, Tensor) and x.is_meta for x in tensors):
        raise OptionError(
            "a measurement needs values, which tensors on the meta device do not have; explain needs none"
        )
    backend = _Measurer(recipe, model if isinstance(model, nn.Module) else None)
    with torch.no_grad():
        compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=False)
        with called_with(model, args, kwargs):
            compiled(*args, **kwargs)
    report = backend.report()
    report.losses = backend.losses
    return report
