"""The settings under which Inductor compiles graphs of fxquant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat.patches import STATIC_LAUNCH
from fxquant.compat.private import inductor_config
from fxquant.decisions import Considered
from fxquant.passes.pipeline import Lowering, Partition
from fxquant.passes.settings import Settings


def inductor_settings(
    settings: Settings,
    by_user: Mapping[str, Any],
    *,
    recomputed: bool,
    reasons: list[Considered] | None = None,
    seen: Callable[[fx.GraphModule], object] | None = None,
    fused: Callable[[fx.Graph], object] | None = None,
    done: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """The settings under which Inductor compiles a quantized graph; the user's own come first.

    `recomputed` says that the backward computes quantized activations again. `reasons` gets those of passes that did
    not fuse something; `seen` is shown the graphs before, and `fused` what they are when kernels are chosen, behind
    which `done` is called.
    """
    chosen: dict[str, Any] = {
        "eager_numerics.division_rounding": True,  # scales are true quotients
        "cpp.enable_loop_tail_vec": False,  # with it, a dynamic tail of a one-byte store loses lanes (torch 2.13)
        # the host launches faster, and a later process loads the kernel from Inductor's cache without parsing it
        STATIC_LAUNCH: True,
        # a recomputed activation must have the bits that the forward quantized
        "emulate_precision_casts": recomputed or inductor_config.emulate_precision_casts,
        # fused beside recomputed tensors, transposed tiles are written in part (C++ backend of torch 2.13)
        **({"cpp.max_horizontal_fusion_size": 1} if recomputed or settings.save == "fp8" else {}),
        **by_user,
    }
    in_cpp = bool(by_user.get("cpp_wrapper", inductor_config.cpp_wrapper))
    settings = replace(
        settings,
        exact_recompute=bool(chosen["emulate_precision_casts"]),
        cpp_wrapper=in_cpp,
        pieces=not (in_cpp or settings.portable),
    )
    for name, of_us in (("custom_partitioner_fn", Partition), ("post_grad_custom_post_pass", Lowering)):
        chosen[name] = of_us(settings, by_user.get(name, getattr(inductor_config, name)), reasons)
    lowering = chosen["post_grad_custom_post_pass"]
    lowering.seen, lowering.fused, lowering.done = seen, fused, done
    return chosen


def memory_settings(example_inputs: Sequence[Any], save: str = "quantized") -> dict[str, Any]:
    """The settings that keep the peak of a training step low on a GPU.

    Inductor holds a tensor's memory for a later one of the same size, unless its estimate of the peak would rise, and
    puts kernels in the order for which it estimates the lowest. That estimate is far too high where fused kernels keep
    tensors to themselves. What is saved in FP8 is restored in kernels of its own, which that order runs too early: it
    then has autograd's.
    """
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not trains or not any(x.is_cuda for x in tensors):
        return {}
    return {"allow_buffer_reuse": False, **({"reorder_for_peak_memory": False} if save == "fp8" else {})}
