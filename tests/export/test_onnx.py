"""Quantized programs in ONNX: standard operators, FP8 weights in the file, and the results of the program itself."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import OneGroupedWeight
from test_program import exported
from torch import Tensor, nn

import fxquant
from fxquant import Calibration, NVFP4BlockScaling, OptionError, ProgramError, onnx_export, quantize_program

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")),
    reason="needs the onnx extra: onnx and onnxscript",
)


SWEEP = [
    pytest.param(name, marks=pytest.mark.sweep) for name in ("current_scaling", "rowwise", "float8_blockwise")
]  # fmt: skip


def evaluated(path: Path, x: Tensor) -> Tensor:
    """The result of a checked file, by the reference evaluator of ONNX."""
    onnx: Any = importlib.import_module("onnx")
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return torch.from_numpy(evaluator(model).run(None, {model.graph.input[0].name: x.numpy()})[0])


def mlp(*shape: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 130)).eval(), torch.randn(*shape, 64)


@needs_onnx
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["static", "mxfp8", *SWEEP])
def test_a_file_gives_the_result_of_the_program(recipe: str, tmp_path: Path) -> None:
    model, x = mlp(8) if recipe == "static" else mlp(8, 3)
    calibration = Calibration([x], progress=False) if recipe == "static" else None
    name = "current_scaling" if recipe == "static" else recipe
    program = quantize_program(exported(model, x), name, calibration=calibration)
    made = onnx_export(program, tmp_path / "model.onnx")
    nodes = Counter(node.op_type for node in made.model.graph)
    assert nodes["QuantizeLinear"] == 2 and nodes["DequantizeLinear"] == 4 and nodes["MatMul"] == 2
    assert {node.domain for node in made.model.graph} == {""}
    types = {name: str(value.dtype) for name, value in made.model.graph.initializers.items()}
    assert types["0.weight_data"] == types["2.weight_data"] == "FLOAT8E4M3FN"
    if recipe == "static":
        assert not {"ReduceMax", "Abs"} & nodes.keys()
    for batch in (x, x[:5] * 3):
        got, want = evaluated(tmp_path / "model.onnx", batch), program.module()(batch).detach()
        # where a scale is no power of two, an element between two codes may get the other one
        assert (got - want).norm() <= (5e-3 if name == "current_scaling" else 1e-6) * want.norm()


def test_what_onnx_does_not_have_is_refused_by_name() -> None:
    model, x = mlp(8)
    source = exported(model, x)
    with pytest.raises(ProgramError, match="ONNX has no operator for nvfp4: export the unquantized program"):
        onnx_export(quantize_program(source, NVFP4BlockScaling(disable_stochastic_rounding=True)))
    with pytest.raises(OptionError, match="from opset 21 on, not in 18"):
        onnx_export(quantize_program(source, "mxfp8"), opset_version=18)
    with pytest.raises(ProgramError, match="expected, not a Sequential"):
        onnx_export(model)  # type: ignore[arg-type]


def test_experts_are_refused_by_name() -> None:
    inputs = torch.randn(40, 32).bfloat16(), torch.tensor([10, 10, 40], dtype=torch.int32)
    program = quantize_program(torch.export.export(OneGroupedWeight(3, 32, 48, dtype=torch.bfloat16), inputs), "mxfp8")
    with pytest.raises(ProgramError, match=r"ONNX has nothing for fxquant\.grouped_scaled_mm"):
        fxquant.onnx_export(program)


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_export_names_the_operator_and_the_format() -> None:
    model, x = mlp(8)
    program = quantize_program(exported(model, x), "mxfp8")
    if importlib.util.find_spec("onnxscript") is None:
        pytest.skip("needs the onnx extra: onnx and onnxscript")
    with pytest.raises(Exception, match=r"fxquant\.quantize.*mxfp8_e4m3"):
        torch.onnx.export(program, dynamo=True, verbose=False)
