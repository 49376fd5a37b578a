"""Programs as they are served: converted, compiled, copied, calibrated on what does not fit, written to odd places."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import NAMES, per_role
from test_program import Levels, exported, run
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from fxquant import (
    Calibration,
    IdentityQuantizer,
    MXFP8Quantizer,
    OptionError,
    ProgramError,
    RecipeError,
    lower_program,
    quantize_program,
    report_of,
)
from fxquant.export.files import load_inputs, load_program
from fxquant.files import check_place
from fxquant.formats import FORMATS, QuantSpec
from fxquant.kernels.cast import ops

DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def perceptron() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval(), torch.randn(8, 64)


def converted(program: ExportedProgram, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What `.to(dtype)` makes of a copy of a program's module."""
    module = copy.deepcopy(program.module()).to(dtype)
    return lambda x: module(x.to(dtype))


@pytest.mark.parametrize("recipe", [name for name in NAMES if name != "high_precision"])
def test_a_module_converted_to_another_dtype_is_refused(recipe: str) -> None:
    model, x = perceptron()
    program = quantize_program(exported(model, x), recipe, calibration=Calibration([x], progress=False))
    lowered = lower_program(program)
    for dtype in (*DTYPES, torch.float32):
        with pytest.raises(RecipeError, match=f"(e4m3|nvfp4).* is {dtype} and has to be .* before it is quantized"):
            converted(program, dtype)(x)
        with pytest.raises(RuntimeError, match="dtype mismatch"):
            converted(lowered, dtype)(x)
    assert torch.equal(copy.deepcopy(program.module()).to("cpu")(x), run(program, x))


@pytest.mark.parametrize("recipe", ["current_scaling", "nvfp4"])
def test_a_converted_static_scale_is_refused(recipe: str) -> None:
    model, x = perceptron()
    program = quantize_program(exported(model, x), recipe, calibration=Calibration([x], progress=False))
    module = program.module()
    name = next(name for name in program.state_dict if ".input_" in name)
    layer, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(layer), leaf, program.state_dict[name].half())
    with pytest.raises(RecipeError, match=r"the state is torch\.float16 and has to be torch\.float32"):
        module(x)


def test_compiled_modules_are_refused_as_they_are_compiled() -> None:
    model, x = perceptron()
    program = quantize_program(exported(model, x), "mxfp8")
    for made, message in ((program, "before it is quantized"), (lower_program(program), "dtype mismatch")):
        module = copy.deepcopy(made.module())
        call = torch.compile(module, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(call(x), module(x))
            module.half()
            with pytest.raises(Exception, match=message):
                call(x.half())


def test_weights_of_a_quantizer_of_the_users_own_are_refused_when_converted() -> None:
    model, x = perceptron()
    recipe = per_role(input=MXFP8Quantizer(), weight=Levels(), grad_output=IdentityQuantizer())
    program = quantize_program(exported(model, x), recipe)
    for each in (program, lower_program(program)):
        with pytest.raises(RuntimeError, match="dtype mismatch"):
            converted(each, torch.float16)(x)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "identity"])
def test_operators_refuse_operands_in_other_dtypes(name: str) -> None:
    """Eagerly and where shapes are found: each part in turn."""
    x = torch.randn(32, 128)
    fxquant = torch.ops.fxquant
    good = fxquant.quantize(x, name, "rowwise")
    grouped = fxquant.split_quantize(x.expand(2, 32, 128), None, name, "rowwise")
    assert tuple(part.dtype for part in good) == QuantSpec.parse(name).row.dtypes
    calls = {
        "dequantize": lambda parts: fxquant.dequantize(parts, name, "rowwise", [32, 128], torch.float32),
        "left": lambda parts: fxquant.scaled_mm(parts, good, name, name, None, torch.float32, True),
        "right": lambda parts: fxquant.scaled_mm(good, parts, name, name, None, torch.float32, True),
        "fused": lambda parts: fxquant.fused_scaled_mm(
            good, parts, name, name, None, torch.float32, True, "", None, False
        ),
    }
    of_groups = {
        "split_dequantize": lambda parts: fxquant.split_dequantize(parts, None, name, 128, torch.float32),
        "grouped": lambda parts: fxquant.grouped_scaled_mm(grouped, parts, None, name, name, torch.float32, True),
    }
    for table, parts in ((calls, good), (of_groups, grouped)):
        for i, part in enumerate(parts):
            wrong = [*parts[:i], part.view(torch.uint8).half() if part.itemsize == 1 else part.half(), *parts[i + 1 :]]
            for call in table.values():
                for device in ("cpu", "meta"):
                    with pytest.raises(RecipeError, match=f"{name}: the .* is torch.float16 and has to be"):
                        call([each.to(device) for each in wrong])


def test_states_of_quantizations_have_their_dtype() -> None:
    x = torch.randn(32, 64)
    for device in ("cpu", "meta"):
        with pytest.raises(RecipeError, match=r"the state is torch\.float16 and has to be torch\.float32"):
            ops.quantize(x.to(device), "per_tensor_e4m3", "rowwise", torch.ones(1, dtype=torch.float16, device=device))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.randn(8, 64).half(), "is torch.float16, not torch.float32"),
        (torch.ones(8, 64, dtype=torch.int64), "is torch.int64, not torch.float32"),
        (torch.randn(8, 64).numpy(), "is a ndarray, not a tensor"),
        (None, "is a NoneType, not a tensor"),
    ],
    ids=["half", "int", "numpy", "none"],
)
def test_calibration_inputs_that_do_not_fit_say_how(given: Any, message: str) -> None:
    model, x = perceptron()
    program = exported(model, x)
    with pytest.raises(ProgramError, match=f"input 2 does not fit the program: input {message}") as caught:
        quantize_program(program, "current_scaling", calibration=Calibration([x, given], progress=False))
    assert "\n" not in str(caught.value)


def test_calibration_inputs_without_a_number_say_so() -> None:
    model, x = perceptron()
    inputs = Calibration([x * torch.nan, x[:0] * 1], progress=False)
    program = export(model, (x,), dynamic_shapes=({0: Dim.AUTO},))
    decisions = report_of(quantize_program(program, "current_scaling", calibration=inputs)).decisions
    assert decisions[0].detail == "dynamic: no calibration input brought a number here"
    with pytest.raises(OptionError, match="1 is no regular expression of layers"):
        Calibration([x], overrides={1: None})  # type: ignore[dict-item]


def test_a_failing_iterable_fails_with_its_own_error() -> None:
    model, x = perceptron()

    def inputs() -> Any:
        yield x
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        quantize_program(exported(model, x), "current_scaling", calibration=Calibration(inputs(), progress=False))


def test_what_stays_takes_no_gradient() -> None:
    """One would end, with nothing said, at the last quantized layer."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)).eval()
    x = torch.randn(8, 64)
    source = exported(model, x)
    program = quantize_program(source, "mxfp8")
    for each in (program, lower_program(program)):
        assert not any(p.requires_grad for p in each.module().parameters())
        with pytest.raises(RuntimeError, match="does not require grad"):
            each.module()(x).sum().backward()
    assert all(p.requires_grad for p in source.module().parameters())
    bias = program.state_dict["1.bias"]
    assert isinstance(bias, nn.Parameter) and bias.data_ptr() == source.state_dict["1.bias"].data_ptr()
    trained = quantize_program(source, "mxfp8", fold_weights=False).module()
    trained(x).sum().backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_weights_with_nan_or_infinities_are_in_the_report() -> None:
    """Formats without a code for them make numbers of them."""
    for value in (torch.nan, torch.inf):
        model, x = perceptron()
        with torch.no_grad():
            model[0].weight[3, 4] = value  # type: ignore[index]
        recipes = ("nvfp4", per_role(input=MXFP8Quantizer(), weight=Levels(), grad_output=IdentityQuantizer()))
        for recipe in recipes:
            details = [d.detail for d in report_of(quantize_program(exported(model, x), recipe)).decisions]
            assert [detail.endswith("; NaN or infinite elements in 0.weight") for detail in details] == [0, 1, 0, 0]


class Cached(nn.Module):
    """Writes what it projects into a cache and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(4, 16, 64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        self.cache[:, place] = self.project(x)  # type: ignore[operator]
        self.calls.add_(1)  # type: ignore[operator]
        return self.out(torch.softmax(x @ self.cache.transpose(1, 2), -1) @ self.cache)  # type: ignore[operator]


def test_caches_stay_empty_while_calibrating_and_fill_when_served() -> None:
    torch.manual_seed(0)
    model, args = Cached().eval(), (torch.randn(4, 2, 64), torch.tensor([0, 1]))
    source = export(model, args)
    program = quantize_program(source, "current_scaling", calibration=Calibration([args, args], progress=False))
    for each in (source, program):
        assert not each.state_dict["cache"].any() and not each.state_dict["calls"]
    module, want = lower_program(program).module(), copy.deepcopy(model)(*args)
    assert (module(*args) - want).norm() < 0.1 * want.norm()
    assert int(module.calls) == 1 and module.cache[:, :2].any() and not module.cache[:, 2:].any()


def test_calibration_leaves_its_inputs_as_they_are() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1))

    x = torch.randn(8, 64)
    program, inputs = export(Writes(64, 64), (x.clone(),)), [x.clone()]
    quantize_program(program, "current_scaling", calibration=Calibration(inputs, progress=False))
    assert torch.equal(inputs[0], x)


def test_state_and_copies_make_the_round_trip() -> None:
    model, x = perceptron()
    for recipe in ("mxfp8", "nvfp4", "current_scaling"):
        program = quantize_program(exported(model, x), recipe, calibration=Calibration([x], progress=False))
        want = run(program, x)
        file = io.BytesIO()
        torch.save(program.module().state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(program)
        for tensor in other.state_dict.values():
            tensor.data.view(torch.uint8).zero_()
        assert not torch.equal(run(other, x), want)
        other.module().load_state_dict(torch.load(file, weights_only=True), strict=True)
        assert torch.equal(run(other, x), want) and str(report_of(other)) == str(report_of(program))
        again = export(program.module(), (x,))
        assert torch.equal(run(again, x), want)
        for each in (program, lower_program(program)):
            assert torch.equal(torch.export.unflatten(each)(x), run(each, x))


def test_places_that_cannot_be_looked_at_are_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300 + ".pt2")
    with pytest.raises(ProgramError, match="cannot be written: File name too long"):
        check_place(long)
    for load in (load_program, load_inputs):
        with pytest.raises(ProgramError, match="no such file"):
            load(long)
