"""The settings under which Inductor compiles graphs of fxquant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxquant.compat.patches import STATIC_LAUNCH
from fxquant.compat.private import inductor_config
from fxquant.passes.pipeline import Lowering, Partition
from fxquant.passes.settings import Settings


def inductor_settings(settings: Settings, given: Mapping[str, Any], *, recomputed: bool) -> dict[str, Any]:
    """The settings under which Inductor compiles a quantized graph; those `given` by the user come first.

    `recomputed` says that the backward computes quantized activations again.
    """
    chosen = {
        "eager_numerics.division_rounding": True,  # scales are true quotients
        "cpp.enable_loop_tail_vec": False,  # with it, a dynamic tail of a one-byte store loses lanes (torch 2.13)
        # the host launches faster, and a later process loads the kernel from Inductor's cache without parsing it
        STATIC_LAUNCH: True,
        # where an activation is recomputed it must come out with the bits that the forward quantized
        "emulate_precision_casts": recomputed or inductor_config.emulate_precision_casts,
        # side by side with what is recomputed, transposed tiles are written in part (C++ backend of torch 2.13)
        **({"cpp.max_horizontal_fusion_size": 1} if recomputed else {}),
        **given,
    }
    settings = replace(
        settings,
        exact_recompute=bool(chosen["emulate_precision_casts"]),
        cpp_wrapper=bool(given.get("cpp_wrapper", inductor_config.cpp_wrapper)),
    )

    def of_user(name: str) -> Any:
        return given.get(name, getattr(inductor_config, name))

    return {
        **chosen,
        "custom_partitioner_fn": Partition(settings, of_user("custom_partitioner_fn")),
        "post_grad_custom_post_pass": Lowering(settings, of_user("post_grad_custom_post_pass")),
    }


def memory_settings(example_inputs: Sequence[Any]) -> dict[str, Any]:
    """The settings that keep the peak of a training step low on a GPU.

    Inductor holds what it will use again for a tensor of the same size, unless that raises the peak as it estimates it,
    which it does far too high where kernels that have been fused keep tensors to themselves.
    """
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return {"allow_buffer_reuse": False} if trains and any(x.is_cuda for x in tensors) else {}


__all__ = ["inductor_settings", "memory_settings"]
