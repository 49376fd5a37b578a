"""Trains, fine-tunes and serves unmodified PyTorch models in FP8, MXFP8 and NVFP4.

    torch.compile(model, backend="fxquant", options={"recipe": "mxfp8"})

`fxquant.explain(model, recipe, *args)` shows the decision for every operand of every matmul.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxquant import factories, recipes
from fxquant.decisions import Decision, SkipReason
from fxquant.errors import (
    FxQuantError,
    FxQuantWarning,
    NonFiniteWarning,
    OptionError,
    ProgramError,
    RecipeError,
    UnquantizedWarning,
    UnusedRuleWarning,
)
from fxquant.quantizers import (
    BlockQuantizer,
    DelayedScalingRequest,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    Float8RowwiseQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    QuantizerRequest,
)
from fxquant.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Float8WeightOnly,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    NVFP4WeightOnly,
    QParams,
    Recipe,
    Rule,
    Rules,
)
from fxquant.roles import Direction, Gemm, QuantizerRole

if TYPE_CHECKING:
    from fxquant.backend.backend import Backend
    from fxquant.backend.controls import autocast
    from fxquant.backend.model import (
        QuantizationState,
        clear_cache,
        load_quantization_state_dict,
        load_state_dict,
        quantization_state_dict,
        report,
        set_recipe,
        state_dict,
    )
    from fxquant.backend.repeated import compile_blocks
    from fxquant.backend.switch import compile
    from fxquant.calibration import Amax, Calibration
    from fxquant.export.program import aoti_compile_and_package, lower_program, onnx_export, quantize_program, report_of
    from fxquant.report.diff_views import diff
    from fxquant.report.report import Report
    from fxquant.tools.bisect import bisect
    from fxquant.tools.explain import explain
    from fxquant.tools.measure import measure
    from fxquant.tools.probe import probe
    from fxquant.tools.probe_log import ProbeLog
    from fxquant.tools.search import search
    from fxquant.weights.agree import precompute_scales
    from fxquant.weights.prepare import prepare_fsdp
    from fxquant.weights.state import payload_state_dict
    from fxquant.weights.store import quantize_parameters, quantized_model_init

__version__ = "0.2.0"

_LAZY = {
    "Amax": "fxquant.calibration",
    "Calibration": "fxquant.calibration",
    "Backend": "fxquant.backend.backend",
    "autocast": "fxquant.backend.controls",
    "clear_cache": "fxquant.backend.model",
    "load_quantization_state_dict": "fxquant.backend.model",
    "quantization_state_dict": "fxquant.backend.model",
    "QuantizationState": "fxquant.backend.model",
    "load_state_dict": "fxquant.backend.model",
    "set_recipe": "fxquant.backend.model",
    "state_dict": "fxquant.backend.model",
    "compile": "fxquant.backend.switch",
    "compile_blocks": "fxquant.backend.repeated",
    "bisect": "fxquant.tools.bisect",
    "explain": "fxquant.tools.explain",
    "measure": "fxquant.tools.measure",
    "search": "fxquant.tools.search",
    "ProbeLog": "fxquant.tools.probe_log",
    "probe": "fxquant.tools.probe",
    "Report": "fxquant.report.report",
    "diff": "fxquant.report.diff_views",
    "payload_state_dict": "fxquant.weights.state",
    "precompute_scales": "fxquant.weights.agree",
    "prepare_fsdp": "fxquant.weights.prepare",
    "quantize_parameters": "fxquant.weights.store",
    "quantized_model_init": "fxquant.weights.store",
    "aoti_compile_and_package": "fxquant.export.program",
    "lower_program": "fxquant.export.program",
    "onnx_export": "fxquant.export.program",
    "quantize_program": "fxquant.export.program",
    "report_of": "fxquant.export.program",
}


class _Operators(type(torch.ops.fxquant)):  # type: ignore[misc]
    """`torch.ops.fxquant`: registers the operators when the first is asked for, such as by `torch.export.load`."""

    __module__ = type(torch.ops).__module__  # saved programs hold it as part of an operator's name

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            import fxquant.kernels  # noqa: F401

            if name in vars(self):  # torch's would put another object in the place of the one that is registered
                return vars(self)[name]
        return super().__getattr__(name)


torch.ops.fxquant = _Operators("fxquant")  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    # the compiler side is imported on first use: torch may import this package while it is still initialising
    import importlib

    if name == "report":  # a package that can be called: its modules would hide a function of this name
        return importlib.import_module("fxquant.report")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    from fxquant.checks import did_you_mean
    from fxquant.spellings import FOREIGN

    hint = f": write {FOREIGN[name]}" if name in FOREIGN else did_you_mean(name, map(_Name, __all__))
    raise AttributeError(f"module 'fxquant' has no attribute {name!r}{hint}")


class _Name(str):
    """A name of this package, as a hint shows it."""

    def __repr__(self) -> str:
        return f"fxquant.{self}"


__all__ = [
    "Amax",
    "Backend",
    "BlockQuantizer",
    "Calibration",
    "CustomRecipe",
    "DType",
    "Decision",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Direction",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8HeadQuantizer",
    "Float8RowwiseQuantizer",
    "Float8RowwiseScaling",
    "Float8WeightOnly",
    "Format",
    "FxQuantError",
    "FxQuantWarning",
    "Gemm",
    "HighPrecision",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4WeightOnly",
    "NonFiniteWarning",
    "OptionError",
    "ProbeLog",
    "ProgramError",
    "QParams",
    "QuantizationState",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "RecipeError",
    "Report",
    "Rule",
    "Rules",
    "SkipReason",
    "UnquantizedWarning",
    "UnusedRuleWarning",
    "__version__",
    "aoti_compile_and_package",
    "autocast",
    "bisect",
    "clear_cache",
    "compile",
    "compile_blocks",
    "diff",
    "explain",
    "factories",
    "load_quantization_state_dict",
    "load_state_dict",
    "lower_program",
    "measure",
    "onnx_export",
    "payload_state_dict",
    "precompute_scales",
    "prepare_fsdp",
    "probe",
    "quantization_state_dict",
    "quantize_parameters",
    "quantize_program",
    "quantized_model_init",
    "recipes",
    "report",
    "report_of",
    "search",
    "set_recipe",
    "state_dict",
]
