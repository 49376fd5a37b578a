"""The recipes that the GPU tests run: the named ones that quantize, and a hybrid."""

from __future__ import annotations

import fxquant
from fxquant import IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer, QuantizerRole, recipes

RECIPES = ("current_scaling", "rowwise", "float8_blockwise", "mxfp8", "nvfp4", "hybrid")


def mxfp8_forward_nvfp4_backward(role: QuantizerRole) -> fxquant.Quantizer:
    """MXFP8 for fprop and NVFP4 for dgrad and wgrad."""
    if role.module_type != "linear":
        return IdentityQuantizer()
    if role.tensor_type == "grad_output":
        return NVFP4Quantizer()
    source = "rowwise_dequantized" if role.tensor_type == "weight" else "original"
    return fxquant.HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(), columnwise_source=source)  # type: ignore[arg-type]


def resolved(name: str) -> fxquant.Recipe:
    """One of RECIPES."""
    return fxquant.CustomRecipe(qfactory=mxfp8_forward_nvfp4_backward) if name == "hybrid" else recipes.get(name)
