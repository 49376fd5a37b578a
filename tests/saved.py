"""What a training graph saves for its backward, counted at real sizes: nothing runs, and no memory is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant import Backend, compat
from fxquant.backend import compile_eager


class _Compiled(Exception):
    pass


class SavedTensors(Backend):
    """Compiles the first graph up to the partitioner, and keeps the fakes of what its forward saves."""

    saved: list[Tensor]

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs: list[fx.GraphModule] = []

        def keep(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph

        with compat.compile_to_look():
            compile_eager(gm, example_inputs, keep, **({"save": self.save} if hasattr(self, "save") else {}))
        forward, backward = graphs
        inputs = {n.name for n in forward.graph.nodes if n.op == "placeholder"}
        made = [n for n in backward.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
        self.saved = [n.meta["val"] for n in made if n.name not in inputs]
        self.graphs = graphs
        raise _Compiled


def saved_tensors(make: Callable[[], tuple[nn.Module, Tensor]], recipe: Any, **options: Any) -> SavedTensors:
    """The backend after it has seen `make()`, made without memory."""
    with torch.device("meta"):
        model, x = make()
    model = model.to_empty(device="cpu")
    backend = SavedTensors(recipe, inner="aot_eager", **options)
    torch.compiler.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(
            torch.empty_like(x, device="cpu").requires_grad_()
        )
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), _Compiled):
            raise
    return backend


def saved_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors' storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
