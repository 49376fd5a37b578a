"""Names of other libraries for what this package has, so that an error can say what to write."""

from __future__ import annotations

_COMPILED = "fxquant.compile(model, recipe): no module is swapped, the model keeps its own"
_ON_PARAMETERS = "fxquant.quantize_program(torch.export.export(model, args), recipe), which stores quantized weights"

FOREIGN = {
    # TransformerEngine
    "fp8_autocast": "fxquant.autocast(recipe=...) around calls of a model from fxquant.compile",
    "fp8_model_init": "fxquant.quantized_model_init(recipe), or fxquant.quantize_parameters(model, recipe)",
    "fp8_calibration": "the argument calibration of fxquant.quantize_program",
    "make_graphed_callables": 'fxquant.compile(model, recipe, mode="reduce-overhead")',
    "checkpoint": "torch.utils.checkpoint.checkpoint",
    "recipe": "fxquant.recipes, or its classes such as fxquant.MXFP8BlockScaling",
    **dict.fromkeys(
        ("Linear", "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "DotProductAttention",
         "MultiheadAttention", "LayerNorm", "RMSNorm"),
        "the modules of torch.nn, and " + _COMPILED,
    ),
    # torchao
    **dict.fromkeys(("convert_to_float8_training", "swap_linear_layers"), _COMPILED),
    "quantize_": f"{_COMPILED}; or {_ON_PARAMETERS}",
    "Float8LinearConfig": 'the name of a recipe, "current_scaling" or "rowwise", or fxquant.Float8CurrentScaling()',
    "precompute_float8_dynamic_scale_for_fsdp": 'options={"cache_weights": True} of fxquant.compile',
    **dict.fromkeys(
        ("Float8DynamicActivationFloat8WeightConfig", "float8_dynamic_activation_float8_weight"),
        'the recipe "current_scaling" or "rowwise"',
    ),
    **dict.fromkeys(("MXLinearConfig", "MXFP8TrainingOpConfig", "MXDynamicActivationMXWeightConfig"),
                    'the recipe "mxfp8", or fxquant.MXFP8BlockScaling()'),
    **dict.fromkeys(("NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4InferenceConfig"), 'the recipe "nvfp4"'),
}  # fmt: skip
"""Names of TransformerEngine and torchao, with what to write here."""
