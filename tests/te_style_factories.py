"""Factories as a user of TransformerEngine writes them, with no change but the three imports."""

from __future__ import annotations

import fxquant as te
import fxquant as tex
from fxquant import (
    CustomRecipe,
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
)
from fxquant.factories import current_scaling_factory, mxfp8_factory

SENSITIVE = ("lm_head", "router", "embed")


def keeps_sensitive_layers(role: QuantizerRole | None):
    """By name and module type, with a default for all else."""
    if role is not None and any(part in role.name for part in SENSITIVE):
        return IdentityQuantizer()
    if role is not None and role.module_type == "grouped_linear":
        return te.Float8BlockQuantizer(
            fp8_dtype=tex.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=True,
            amax_epsilon=0.0,
            force_pow_2_scales=True,
            block_scaling_dim=2 if role.tensor_type == "weight" else 1,
        )
    return mxfp8_factory(role)


def per_tensor(role: QuantizerRole | None):
    """Positional element types and a device, as the older examples have it."""
    if role is not None and role.tensor_type == "grad_output":
        return Float8CurrentScalingQuantizer(tex.DType.kFloat8E5M2, device="cuda")
    return Float8CurrentScalingQuantizer(
        tex.DType.kFloat8E4M3,
        device="cuda",
        rowwise=True,
        columnwise=True,
        with_amax_reduction=False,
        amax_reduction_group=None,
        force_pow_2_scales=True,
        amax_epsilon=1e-6,
    )


def one_format_per_gemm(role: QuantizerRole | None):
    """fprop in MXFP8, dgrad in NVFP4, wgrad in FP8 blocks."""

    def nvfp4():
        return NVFP4Quantizer(fp4_dtype=tex.DType.kFloat4E2M1, with_rht=False, with_post_rht_amax=False)

    def block():
        return Float8BlockQuantizer(fp8_dtype=tex.DType.kFloat8E4M3, block_scaling_dim=1)

    mxfp8 = MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3)
    if role is not None and role.tensor_type == "weight":
        return HybridQuantizer(
            rowwise_quantizer=mxfp8,
            columnwise_quantizer=nvfp4(),
            columnwise_source="rowwise_dequantized",
        )
    if role is not None and role.tensor_type == "grad_output":
        return HybridQuantizer(rowwise_quantizer=nvfp4(), columnwise_quantizer=block(), columnwise_source="original")
    return HybridQuantizer(rowwise_quantizer=mxfp8, columnwise_quantizer=block())


def nvfp4_in_full(role: QuantizerRole | None):
    """Every keyword of NVFP4's quantizer."""
    weight = role is not None and role.tensor_type == "weight"
    gradient = role is not None and role.tensor_type == "grad_output"
    row_scaled = role is not None and role.tensor_type == "input" and "experts" in role.name
    rht = not weight and not row_scaled
    return NVFP4Quantizer(
        fp4_dtype=tex.DType.kFloat4E2M1,
        rowwise=True,
        columnwise=True,
        with_amax_reduction=False,
        amax_reduction_group=None,
        with_rht=rht,
        with_post_rht_amax=rht,
        with_2d_quantization=weight,
        stochastic_rounding=gradient,
        row_scaled_nvfp4=row_scaled,
        with_random_sign_mask=True,
    )


def delayed_attention_output(role: QuantizerRole | None):
    """Stateful for one layer, stateless for the others, and attention by its tensor types."""
    if role is not None and role.module_type == "dpa":
        if role.tensor_type in ("s", "dp"):
            return DelayedScalingRequest(
                fp8_format=te.Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=True
            )
        return current_scaling_factory(role)
    if role is not None and role.name.endswith("down"):
        return DelayedScalingRequest(
            fp8_format=te.Format.HYBRID, margin=0, amax_history_len=16, amax_compute_algo="max", reduce_amax=False
        )
    return current_scaling_factory(role)


def older_roles(role: str):
    """From the time when roles were strings."""
    if role in ("linear_input", "linear_weight", "linear_output"):
        return Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device="cuda")
    if role in ("linear_grad_output", "linear_grad_input"):
        return Float8CurrentScalingQuantizer(tex.DType.kFloat8E5M2, device="cuda")
    return None


RECIPES = {
    f.__name__: CustomRecipe(qfactory=f)
    for f in (keeps_sensitive_layers, per_tensor, one_format_per_gemm, delayed_attention_output)
}
