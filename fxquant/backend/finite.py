"""The first value that is not finite in a model that runs, where ``FXQUANT_VERIFY`` is 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant.compat.private import tree_leaves
from fxquant.errors import NonFiniteWarning, tell
from fxquant.passes.graph.meta import STACK_TRACE
from fxquant.passes.graph.names import op_name
from fxquant.passes.plan.layers import layer_name

Run = Callable[..., Any]


class FiniteCheck:
    """Looks behind every run of a captured graph, forward and backward, for what is not finite.

    Where something is, though what went in was finite, the graph runs again, operator by operator on copies, and a
    warning names the first that made it.
    """

    def __init__(self, gm: fx.GraphModule, names: Callable[[], Mapping[str, str]], what: str) -> None:
        self.gm, self.names, self.what = gm, names, what
        self.told: set[str] = set()

    def watching(self, run: Run) -> Run:
        """A function that does what `run` does, and looks at its results."""

        def watched(*inputs: Any) -> Any:
            if "forward" in self.told and "backward" in self.told:
                return run(*inputs)
            copies = [_copy(x) for x in inputs]
            outputs = run(*inputs)
            leaves = _floats(outputs)
            if not all(map(_is_finite, leaves)):
                self._tell_forward(copies)
            for node in dict.fromkeys(x.grad_fn for x in leaves if x.grad_fn is not None):
                node.register_hook(self._behind_backward(copies, [x if x.grad_fn is node else None for x in leaves]))
            return outputs

        return watched

    def _tell_forward(self, inputs: Sequence[Any]) -> None:
        if "forward" in self.told:
            return
        self.told.add("forward")
        if not all(map(_is_finite, _floats(inputs))):
            nodes = self.gm.graph.find_nodes(op="placeholder")
            names = [str(n.name) for n, x in zip(nodes, inputs, strict=True) if not all(map(_is_finite, _floats(x)))]
            self._tell(f"an input of its graph is not finite already: {', '.join(names)}")
            return
        runner = _Runner(self.gm)
        with torch.no_grad():
            runner.run(*inputs)
        if runner.first is not None:
            node, kind = runner.first
            self._tell(f"the forward has its first {kind} in {self._place(node)}")

    def _behind_backward(self, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> Callable[..., None]:
        """A hook of an autograd node that has just computed gradients of a graph's inputs from those of outputs."""
        numbers = [None if x is None else x.output_nr for x in outputs]

        def look(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            finite = all(x is None or _is_finite(x) for x in grad_inputs)
            if finite or "backward" in self.told:
                return
            self.told.add("backward")
            if not all(x is None or _is_finite(x) for x in grad_outputs):
                self._tell("a gradient that enters the backward of its graph is not finite already")
                return
            tangents = [None if number is None else grad_outputs[number] for number in numbers]
            node = _Runner(self.gm).first_gradient(inputs, tangents)
            if node is not None:
                self._tell(f"the backward has its first gradient that is not finite in {self._place(node)}")

        return look

    def _place(self, node: fx.Node) -> str:
        """The layer, operator and line of a node."""
        layer = layer_name(node, self.names())
        lines = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get(STACK_TRACE) or "")
        where = f" ({lines[-1][0]}:{lines[-1][1]}, {lines[-1][2]})" if lines else ""
        return f"{op_name(node) or node.name} of {layer or 'the model itself'}{where}"

    def _tell(self, text: str) -> None:
        tell(f"{self.what}: {text}", NonFiniteWarning)


class _Runner(fx.Interpreter):
    """Runs a captured graph operator by operator, and keeps the first whose result is not finite, with its kind."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.first: tuple[fx.Node, str] | None = None
        self.gradients: list[fx.Node] | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "output", "get_attr") and self.gradients is None:
            return result
        for x in _floats(result) if n.op != "output" else ():
            if self.gradients is not None and x.requires_grad:
                x.register_hook(lambda gradient: self._see(gradient, n))  # type: ignore[no-untyped-call, unused-ignore]
            elif self.gradients is None and self.first is None and (kind := _fault(x, n)):
                self.first = (n, kind)
        return result

    def _see(self, gradient: Tensor, node: fx.Node) -> None:
        assert self.gradients is not None
        if not _is_finite(gradient):
            self.gradients.append(node)

    def first_gradient(self, inputs: Sequence[Any], tangents: Sequence[Tensor | None]) -> fx.Node | None:
        """The operator in whose backward the first gradient arises that is not finite."""
        self.gradients = []
        with torch.enable_grad():
            outputs = _floats(self.run(*inputs))
            pairs = [(x, t) for x, t in zip(outputs, tangents, strict=True) if t is not None and x.requires_grad]
            wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.grad([x for x, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True)
        if not self.gradients:
            return None
        node = self.gradients[0]  # its consumer has computed this gradient
        return next((user for user in node.users if user.op != "output"), node)


def _copy(x: Any) -> Any:
    """A leaf with the values of a tensor; those of a parameter, which a run does not change, are not copied."""
    if not isinstance(x, Tensor):
        return x
    values = x.detach() if isinstance(x, nn.Parameter) else x.detach().clone()
    return values.requires_grad_(x.requires_grad) if x.is_floating_point() else values


def _floats(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta]


def _is_finite(x: Tensor) -> bool:
    return bool(x.detach().float().isfinite().all())


_PRODUCTS = ("linear", "mm", "bmm", "matmul", "addmm", "einsum")


def _fault(x: Tensor, node: fx.Node) -> str:
    """NaN or Inf; a mask of -inf, which attention adds to scores, is no fault."""
    values = x.detach().float()
    if values.isnan().any():
        return "NaN"
    infinite = values.isinf()
    masks = op_name(node) not in _PRODUCTS and not (values[infinite] > 0).any()
    return "Inf" if infinite.any() and not masks else ""
