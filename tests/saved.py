"""What a training graph saves for its backward, counted at real sizes: nothing runs, and no memory is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxquant import Backend
from fxquant.backend.inductor import inductor_settings
from fxquant.compat.patches import compile_with_inductor
from fxquant.passes.pipeline import Partition


class _Partitioned(Exception):
    pass


class SavedTensors(Backend):
    """Compiles the first graph up to its partition, and keeps that and the fakes of what the forward saves."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: list[Tensor]

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        settings = inductor_settings(self.settings, {}, recomputed=False)

        class Record(Partition):
            def __call__(_, *args: Any, **kwargs: Any) -> Any:
                self.forward, self.backward = super().__call__(*args, **kwargs)
                raise _Partitioned

        return compile_with_inductor(
            gm,
            example_inputs,
            {**settings, "custom_partitioner_fn": Record(self.settings), "force_disable_caches": True},
        )

    def note(self) -> None:
        inputs = {n.name for n in self.forward.graph.find_nodes(op="placeholder")}
        nodes = self.backward.graph.find_nodes(op="placeholder")
        made = [n for n in nodes if not n.name.startswith("tangents") and n.name not in inputs]
        self.saved = [n.meta["val"] for n in made if isinstance(n.meta["val"], Tensor)]

    @property
    def total(self) -> int:
        """Bytes of the storages that are saved, those of the graph's inputs not."""
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.saved}.values())


def saved_tensors(
    make: Callable[[], tuple[nn.Module, Tensor]], recipe: Any, device: str = "cuda", **options: Any
) -> SavedTensors:
    """The backend after it has seen the model and input that `make` gives, which are made without memory.

    They are on the CPU; on its `device` a backend fuses what it casts.
    """
    with torch.device("meta"):
        model, x = make()
    model, x = model.to_empty(device="cpu"), torch.empty_like(x, device="cpu").requires_grad_()
    backend = SavedTensors(recipe, **options)
    backend.settings = replace(backend.settings, device=device)
    torch.compiler.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), _Partitioned):
            raise
    backend.note()
    return backend
