"""The one value that every pass gets besides what it works on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How graphs are rewritten. Its repr is part of the key under which Inductor caches what it has compiled.

    `recipe` is the recipe's fingerprint. `allow_float64` quantizes float64 operands too. With `stored_weights`
    quantized weights are kept, and not cast in each call. `save` is one of `SAVE`, `gemm` one of
    `kernels.linear.choice.GEMM`. With `quantized_dispatch` ranks exchange tokens quantized. `device` is the type of
    device whose tensors are fused. A `portable` graph works where fxquant is not; `kernels` says that Triton kernels
    will be compiled into what runs. With `exact_recompute` what is fused must give the bits of Inductor's own kernels.
    `cpp_wrapper` says that Inductor writes C++ around kernels. With `pieces` graphs for a CPU call casts that are
    compiled once for all of them. With `ranges` products have
    names for a profiler. With `own_regions` every call of a region has a body of its own, whatever it is like.
    """

    recipe: str = ""
    allow_float64: bool = False
    stored_weights: bool = False
    save: str = "quantized"
    gemm: str = "auto"
    quantized_dispatch: bool = False
    device: str = "cuda"
    portable: bool = False
    kernels: bool = True
    exact_recompute: bool = False
    cpp_wrapper: bool = False
    pieces: bool = False
    ranges: bool = False
    own_regions: bool = False


SAVE = ("quantized", "less", "least", "fp8")
"""The choices of what a forward saves for its backward."""
