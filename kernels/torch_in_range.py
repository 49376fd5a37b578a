"""Torch's own products as operators that run inside of a range of the profiler, under a name."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fxquant.compat.private import OpOverload, fake_kernel, operator_library, schema_of

_ATTENTIONS = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
)
_CPU = "_scaled_dot_product_flash_attention_for_cpu"
TORCH_PRODUCTS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm", "convolution"), ""),
    "convolution_backward": "backward",
    **dict.fromkeys((*_ATTENTIONS, _CPU), "attention"),
    **dict.fromkeys((*(f"{name}_backward" for name in _ATTENTIONS), f"{_CPU}_backward"), "attention backward"),
}
"""The names of torch's operators that multiply, with the words for those that are no GEMM; not each torch has all."""


@functools.cache
def torch_in_range(target: OpOverload) -> Any:
    """The operator of torch behind one more argument, the name under which a profiler shows it."""
    name, library = f"aten_{target.__name__.replace('.', '_')}_in_range", _library()

    def run(range: str, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(range):
            return target(*args, **kwargs)

    library.define(f"{name}(str range, {schema_of(target).removeprefix('(')}", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    fake_kernel(library, name)(lambda range, *args, **kwargs: target(*args, **kwargs))
    return getattr(torch.ops.fxquant_kernels, name).default


def register_torch_ranges() -> None:
    """Registers all of them, for graphs that come from a cache."""
    for name in TORCH_PRODUCTS:
        if hasattr(torch.ops.aten, name):
            torch_in_range(getattr(torch.ops.aten, name).default)


@functools.cache
def _library() -> Any:
    return operator_library("fxquant_kernels", more=True)
