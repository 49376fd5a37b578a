"""`fxquant.measure`: how far quantized products are from unquantized ones of the same tensors, layer by layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.backend import Backend, compile_eager
from fxquant.compat import own_errors
from fxquant.formats import IDENTITY, AttentionSpec, QuantSpec
from fxquant.kernels import attention_reference, reference
from fxquant.passes.base import is_fxquant
from fxquant.recipes import Recipe
from fxquant.report import Loss, Report


class _Measurer(Backend):
    """Runs the rewritten graphs operator by operator, and each product once more without quantization."""

    def __init__(self, recipe: Recipe | str, model: nn.Module | None) -> None:
        super().__init__(recipe, inner="aot_eager", model=model)
        self.losses: list[Loss] = []

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            return lambda *inputs: _Run(graph_module, self.losses).run(*inputs)

        return compile_eager(gm, example_inputs, inner)


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, losses: list[Loss]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.losses = losses

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if is_fxquant(n, "scaled_mm"):
            self._linear(n, result)
        elif is_fxquant(n, "attention_forward"):
            self._attention(n, result)
        return result

    def _linear(self, node: fx.Node, result: Tensor) -> None:
        args, _ = self.fetch_args_kwargs_from_env(node)
        pairs = []
        for parts, text, nodes in zip(args[:2], args[2:4], node.args[:2], strict=True):
            seen, source = reference.dequantize(parts, QuantSpec.parse(text)), self._source(nodes)
            pairs.append((seen if source is None else source.float(), seen))
        inner = min(source.shape[-1] for source, _ in pairs)  # what is quantized is padded
        left, right = (source[..., :inner] for source, _ in pairs)
        exact = left @ right.mT
        exact = exact if args[4] is None else exact + args[4]
        self._add(node, "linear", result, exact, dict(zip(("input", "weight"), pairs, strict=True)))

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
        """What an operand is a quantization of, as it is multiplied; None where that is not in this graph."""
        made = parts[0]
        if made.target is not operator.getitem or not isinstance(made.args[0], fx.Node):
            return None
        cast = made.args[0]
        if is_fxquant(cast, "quantize_qkv"):
            three: Tensor = self.env[cast.all_input_nodes[int(made.args[1]) // 2]]
            return three
        names = ("quantize", "hybrid_quantize", "quantize_heads")
        if not any(is_fxquant(cast, name) for name in names):
            return None
        source: Tensor = self.env[cast.all_input_nodes[0]]
        column = made.args[1] > 1 if is_fxquant(cast, "hybrid_quantize") else cast.args[2] == "columnwise"
        return source.mT if column else source

    def _add(
        self, node: fx.Node, what: str, result: Tensor, exact: Tensor, pairs: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        error = (result.float() - exact).norm() / exact.norm().clamp_min(1e-30)
        lost = {name: _lost(*pair) for name, pair in pairs.items()}
        layer = node.meta.get("custom", {}).get("fxquant", "")
        self.losses.append(Loss(layer=layer, what=what, error=error.item(), lost=lost))


def _lost(source: Tensor, seen: Tensor) -> float:
    """The share of elements that are not zero and become it."""
    seen = seen[..., : source.shape[-1]]
    return ((source != 0) & (seen == 0)).float().mean().item()


def measure(model: Callable[..., Any], recipe: Recipe | str, *args: Any, **kwargs: Any) -> Report:
    """Runs `model(*args, **kwargs)` under `recipe` without gradients, and reports what each product loses.

    `Report.losses` has, for every quantized linear and attention, the error of its result against the float32 one of
    the same tensors, relative in the norm, and the share of the elements of each operand that became zero. The sizes
    and values of the example count; operators run one by one, so that it takes far longer than the compiled model.
    """
    backend = _Measurer(recipe, model if isinstance(model, nn.Module) else None)
    with own_errors(), torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(*args, **kwargs)
    report = backend.report()
    report.losses = backend.losses
    return report
