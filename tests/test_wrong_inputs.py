"""Wrong inputs at every door: one sentence of this package's, at the first line that could know.

`KNOWN` holds what gives something else, with its reason: five at most.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import OneLinear
from torch import Tensor, nn

import fxquant
from fxquant import (
    BlockQuantizer,
    CustomRecipe,
    DelayedScaling,
    FxQuantError,
    HybridQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Rule,
    Rules,
    factories,
)

EAGER = {"inner": "aot_eager"}
MX = MXFP8Quantizer()
Call = Callable[[], Any]


def x(*shape: int, **kwargs: Any) -> Tensor:
    return torch.randn(*(shape or (32, 64)), **kwargs)


@functools.cache
def program() -> torch.export.ExportedProgram:
    return torch.export.export(OneLinear().eval(), (x(),))


def run(recipe: Any, **options: Any) -> Any:
    return fxquant.compile(OneLinear(), recipe, options={**EAGER, **options})(x())


def named(options: Any) -> Any:
    return torch.compile(OneLinear(), backend="fxquant", options=options)(x())


def answering(answer: Any) -> Any:
    return run(CustomRecipe(qfactory=lambda role: answer))


def fails(role: Any) -> Any:
    raise ZeroDivisionError("in a factory")


def reads(role: Any) -> Any:
    return role.tensor_typ


def compiled() -> Any:
    return fxquant.compile(OneLinear(), "delayed_scaling", options=EAGER)


@functools.cache
def report() -> fxquant.Report:
    return fxquant.explain(OneLinear(), "mxfp8", x())


def log() -> fxquant.ProbeLog:
    session: Any = SimpleNamespace(rows=[])
    return fxquant.ProbeLog(session)


COMPILE: dict[str, Call] = {
    "compile()": lambda: fxquant.compile(),
    "compile(model)": lambda: fxquant.compile(OneLinear()),
    "compile(None)": lambda: fxquant.compile(None, "mxfp8"),
    "compile(3)": lambda: fxquant.compile(3, "mxfp8"),
    "compile('model')": lambda: fxquant.compile("model", "mxfp8"),
    "compile(a class)": lambda: fxquant.compile(OneLinear, "mxfp8"),
    "compile(a tensor)": lambda: fxquant.compile(x(), "mxfp8"),
    "compile(state dict)": lambda: fxquant.compile(OneLinear().state_dict(), "mxfp8"),
    "compile(script)": lambda: fxquant.compile(torch.jit.script(nn.Linear(64, 64)), "mxfp8"),
    "compile(program)": lambda: fxquant.compile(program(), "mxfp8"),
    "compile(recipe, model)": lambda: fxquant.compile("mxfp8", OneLinear()),
    "recipe None": lambda: fxquant.compile(OneLinear(), None),
    "recipe 3": lambda: fxquant.compile(OneLinear(), 3),
    "recipe a class": lambda: fxquant.compile(OneLinear(), MXFP8BlockScaling),
    "recipe a quantizer": lambda: fxquant.compile(OneLinear(), MX),
    "recipe a factory": lambda: fxquant.compile(OneLinear(), factories.mxfp8),
    "recipe a list": lambda: fxquant.compile(OneLinear(), ["mxfp8"]),
    "recipe a dtype": lambda: fxquant.compile(OneLinear(), torch.float8_e4m3fn),
    "recipe ''": lambda: fxquant.compile(OneLinear(), ""),
    "recipe misspelled": lambda: fxquant.compile(OneLinear(), "mxpf8"),
    "recipe in capitals": lambda: fxquant.compile(OneLinear(), "MXFP8"),
    "recipe fp8": lambda: fxquant.compile(OneLinear(), "fp8"),
    "recipe int8": lambda: fxquant.compile(OneLinear(), "int8"),
    "auto of nothing": lambda: fxquant.compile(OneLinear(), "auto()"),
    "auto unclosed": lambda: fxquant.compile(OneLinear(), "auto(mxfp8"),
    "inner as a keyword": lambda: fxquant.compile(OneLinear(), "mxfp8", inner="aot_eager"),
    "an unknown keyword": lambda: fxquant.compile(OneLinear(), "mxfp8", dynamc=True),
    "backend": lambda: fxquant.compile(OneLinear(), "mxfp8", backend="inductor"),
    "options a list": lambda: fxquant.compile(OneLinear(), "mxfp8", options=["inner"]),
    "options with recipe": lambda: fxquant.compile(OneLinear(), "mxfp8", options={"recipe": "nvfp4"}),
    "mode fast": lambda: fxquant.compile(OneLinear(), "mxfp8", mode="fast"),
    "mode 3": lambda: fxquant.compile(OneLinear(), "mxfp8", mode=3),
    "set_recipe misspelled": lambda: compiled().set_recipe("mxpf8"),
    "set_recipe()": lambda: compiled().set_recipe(),
    "autocast positional": lambda: fxquant.autocast("mxfp8"),
    "autocast misspelled": lambda: fxquant.autocast(recipe="mxpf8").__enter__(),
    "autocast fp8_recipe": lambda: fxquant.autocast(fp8_recipe="mxfp8"),
    "autocast enabled a name": lambda: fxquant.autocast(enabled="mxfp8"),
    "set_recipe of no recipe": lambda: fxquant.set_recipe(compiled()),
    "set_recipe out of order": lambda: fxquant.set_recipe("mxfp8", compiled()),
    "report of two": lambda: fxquant.report(compiled(), "mxfp8"),
    "report of a class": lambda: fxquant.report(OneLinear),
    "load_state_dict of no state": lambda: fxquant.load_state_dict(compiled()),
    "QuantizationState()": lambda: fxquant.QuantizationState(),
    "QuantizationState(None)": lambda: fxquant.QuantizationState(None),
    "an empty state": lambda: compiled().load_quantization_state_dict({"a": 1}),
    "state None": lambda: compiled().load_quantization_state_dict(None),
}
OPTIONS: dict[str, Call] = {
    "named, no options": lambda: named(None),
    "named, no recipe": lambda: named(EAGER),
    "named, misspelled recipe": lambda: named({"recipe": "mxpf8", **EAGER}),
    "named, misspelled option": lambda: named({"recpie": "mxfp8"}),
    "named, inner": lambda: named({"recipe": "mxfp8", "inner": "eager"}),
    "named, recipe None": lambda: named({"recipe": None}),
    "Backend()": lambda: fxquant.Backend(),
    "Backend misspelled option": lambda: fxquant.Backend("mxfp8", iner="aot_eager"),
    "Backend two positions": lambda: fxquant.Backend("mxfp8", "aot_eager"),
    "Backend model a name": lambda: fxquant.Backend("mxfp8", model="model"),
    "inner tvm": lambda: fxquant.Backend("mxfp8", inner="tvm"),
    "inner None": lambda: fxquant.Backend("mxfp8", inner=None),
    "save most": lambda: fxquant.Backend("mxfp8", save="most"),
    "gemm cutlass": lambda: fxquant.Backend("mxfp8", gemm="cutlass"),
    "cache_weights 1": lambda: fxquant.Backend("mxfp8", cache_weights=1),
    "allow_float64 'yes'": lambda: fxquant.Backend("mxfp8", allow_float64="yes"),
    "amax_group 'row'": lambda: fxquant.Backend("mxfp8", amax_group="row"),
    "inductor a list": lambda: fxquant.Backend("mxfp8", inductor=["max_autotune"]),
    "inductor misspelled": lambda: fxquant.Backend("mxfp8", inductor={"max_autotunne": True}),
    "inductor a number": lambda: fxquant.Backend("mxfp8", inductor={3: True}),
    "inductor has a mode": lambda: fxquant.Backend("mxfp8", inductor={"mode": "max-autotune"}),
    "Inductor's as an option": lambda: named({"recipe": "mxfp8", "triton.cudagraphs": True}),
    "Backend of options": lambda: fxquant.Backend("mxfp8", options=EAGER),
    "inductor has inner": lambda: fxquant.Backend("mxfp8", inductor={"inner": "aot_eager"}),
}
RECIPES: dict[str, Call] = {
    "get(3)": lambda: fxquant.recipes.get(3),
    "get()": lambda: fxquant.recipes.get(),
    "auto()": lambda: fxquant.recipes.auto(),
    "a recipe without an answer": lambda: run(fxquant.Recipe()),
    "a model for a recipe": lambda: fxquant.quantized_model_init(OneLinear()).__enter__(),
    "a program for a recipe": lambda: fxquant.quantize_program("mxfp8", program()),
    "a format by name": lambda: fxquant.Format("e4m3"),
    "a factory of a text": lambda: factories.mxfp8("linear_input"),
    "a paper's factory of a text": lambda: factories.mxfp6("linear_input"),
    "auto(3)": lambda: fxquant.recipes.auto(3),
    "margin a": lambda: DelayedScaling(margin="a"),
    "margin nan": lambda: DelayedScaling(margin=float("nan")),
    "history 0": lambda: DelayedScaling(amax_history_len=0),
    "history 1.5": lambda: DelayedScaling(amax_history_len=1.5),
    "algorithm": lambda: DelayedScaling(amax_compute_algo="mean"),
    "interval": lambda: DelayedScaling(interval=2),
    "pure e5m2": lambda: fxquant.DelayedScalingRequest(fp8_format=fxquant.Format.E5M2),
    "format E4M3": lambda: fxquant.Float8CurrentScaling(fp8_format="E4M3"),
    "format a dtype": lambda: fxquant.Float8CurrentScaling(fp8_format=torch.float8_e4m3fn),
    "positional setting": lambda: fxquant.Float8CurrentScaling(True, 3, 4, 5, 6, 7, 8, 9),
    "block=16": lambda: MXFP8BlockScaling(block=16),
    "power of two a number": lambda: fxquant.Float8RowwiseScaling(use_power_2_scales=2),
    "block dim 3": lambda: fxquant.Float8BlockScaling(x_block_scaling_dim=3),
    "two tiles": lambda: run(fxquant.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=2)),
    "4over6 some": lambda: fxquant.NVFP4BlockScaling(nvfp4_4over6="some"),
    "rows and rht": lambda: fxquant.NVFP4BlockScaling(row_scaled_activation=True),
    "override": lambda: MXFP8BlockScaling(backward_override="bf16"),
    "fp8_mha": lambda: MXFP8BlockScaling(fp8_mha=True),
    "qfactory 3": lambda: CustomRecipe(qfactory=3),
    "qfactory None": lambda: CustomRecipe(qfactory=None),
    "qfactory a quantizer": lambda: CustomRecipe(qfactory=MX),
    "qfactory a class": lambda: CustomRecipe(qfactory=MXFP8Quantizer),
    "qfactory a name": lambda: CustomRecipe(qfactory="mxfp8"),
    "CustomRecipe()": lambda: CustomRecipe(),
    "factory of nothing": lambda: answering(None),
    "factory of a number": lambda: answering(3),
    "factory of a class": lambda: answering(MXFP8Quantizer),
    "factory without role": lambda: run(CustomRecipe(qfactory=lambda: MX)),
    "factory that fails": lambda: run(CustomRecipe(qfactory=fails)),
    "factory that misspells": lambda: run(CustomRecipe(qfactory=reads)),
    "Rule()": lambda: Rule(),
    "Rule(None)": lambda: Rule(None),
    "Rule(layer=)": lambda: Rule(MX, layer="head"),
    "Rule of a number": lambda: Rule(3),
    "Rule of a bad pattern": lambda: Rule(MX, name="("),
    "Rule name a number": lambda: Rule(MX, name=3),
    "Rule of Linear": lambda: Rule(MX, module_type="Linear"),
    "Rule of weights": lambda: Rule(MX, tensor_type="weights"),
    "Rules of a rule": lambda: Rules(Rule(MX)),
    "Rules of quantizers": lambda: Rules([MX]),
    "Rules default 3": lambda: Rules([], default=3),
    "by_name a list": lambda: factories.by_name(["lm_head"]),
    "by_name a bad pattern": lambda: factories.by_name({"(": "mxfp8"}),
    "by_module_type Linear": lambda: factories.by_module_type({"Linear": "mxfp8"}),
    "first_and_last of nothing": lambda: factories.first_and_last("mxfp8", first=1, last=1),
    "first -1": lambda: factories.first_and_last("mxfp8", first=-1, last=1, layers=8),
    "string roles 3": lambda: factories.from_string_roles(3),
    "a role of a layer": lambda: fxquant.QuantizerRole(layer="head"),
    "a role of Linear": lambda: fxquant.QuantizerRole("Linear", "weight"),
    "a role of weights": lambda: fxquant.QuantizerRole("linear", "weights"),
    "a role of q": lambda: fxquant.QuantizerRole("dpa", "q"),
    "a role of a direction": lambda: fxquant.QuantizerRole(direction="rowwise"),
    "a role of a number": lambda: fxquant.QuantizerRole(3),
    "a GEMM by another name": lambda: fxquant.Gemm("fwd"),
    "a direction by another name": lambda: fxquant.Direction("row"),
    "a reason by another name": lambda: fxquant.SkipReason("small"),
}
QUANTIZERS: dict[str, Call] = {
    "quantize a list": lambda: MX.quantize([1, 2]),
    "quantize integers": lambda: MX.quantize(torch.ones(4, 32, dtype=torch.int32)),
    "quantize a number": lambda: MX.quantize(torch.tensor(1.0)),
    "quantize FP8": lambda: MX.quantize(x().to(torch.float8_e4m3fn)),
    "quantize a sparse one": lambda: MX.quantize(x().to_sparse()),
    "a seed for a generator": lambda: NVFP4Quantizer(stochastic_rounding=True).quantize(x(), generator=3),
    "dequantize a tensor": lambda: MX.dequantize(x()),
    "no direction": lambda: MX.quantize(x(), rowwise=False, columnwise=False),
    "direction row": lambda: MX.quantize(x()).dequantize("row"),
    "direction missing": lambda: MX.quantize(x(), columnwise=False).dequantize("columnwise"),
    "a half of one part": lambda: BlockQuantizer("e2m3").dequantize_side([x()]),
    "a half of numbers": lambda: BlockQuantizer("e2m3").dequantize_side([x(), x()]),
    "a half that is a tensor": lambda: BlockQuantizer("e2m3").dequantize_side(x()),
    "a half of no direction": lambda: BlockQuantizer("e2m3").quantize_side(x(), "row"),
    "fp8_dtype int8": lambda: MXFP8Quantizer(fp8_dtype=torch.int8),
    "fp8_dtype a name": lambda: MXFP8Quantizer(fp8_dtype="e4m3"),
    "block 16": lambda: MXFP8Quantizer(block_size=16),
    "scale mode": lambda: MXFP8Quantizer(scale_mode="up"),
    "dimension 3": lambda: fxquant.Float8BlockQuantizer(block_scaling_dim=3),
    "epsilon -1": lambda: fxquant.Float8CurrentScalingQuantizer(amax_epsilon=-1),
    "amax reduction": lambda: fxquant.Float8CurrentScalingQuantizer(amax_reduction_group="tp"),
    "rht without amax": lambda: NVFP4Quantizer(with_rht=True),
    "256 alone": lambda: NVFP4Quantizer(nvfp4_e4m3_max=256),
    "rows and tiles": lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True),
    "hybrid of None": lambda: HybridQuantizer(None, None),
    "hybrid of names": lambda: HybridQuantizer("mxfp8", "nvfp4"),
    "hybrid of one": lambda: HybridQuantizer(MX, MX),
    "hybrid of hybrids": lambda: HybridQuantizer(HybridQuantizer(MX, MX.copy()), MX),
    "hybrid source": lambda: HybridQuantizer(MX, NVFP4Quantizer(), columnwise_source="x"),
    "identity dtype": lambda: fxquant.IdentityQuantizer(dtype="bfloat16"),
    "e5m2 by e5m2": lambda: answering(MXFP8Quantizer(torch.float8_e5m2)),
    "an element": lambda: BlockQuantizer("e9m9"),
    "a block": lambda: BlockQuantizer("int8", 32),
    "an abstract quantizer": lambda: answering(fxquant.Quantizer()),
}
TOOLS: dict[str, Call] = {
    "explain(None)": lambda: fxquant.explain(None, "mxfp8", x()),
    "explain(model)": lambda: fxquant.explain(OneLinear()),
    "explain(model, x)": lambda: fxquant.explain(OneLinear(), x()),
    "explain a program": lambda: fxquant.explain(program(), "mxfp8", x()),
    "explain misspelled": lambda: fxquant.explain(OneLinear(), "mxpf8", x()),
    "measure(None)": lambda: fxquant.measure(None, "mxfp8", x()),
    "measure meta": lambda: fxquant.measure(OneLinear().to("meta"), "mxfp8", x(device="meta")),
    "to_html(None)": lambda: report().to_html(None),
    "to_html no folder": lambda: report().to_html("absent/page.html"),
    "layer (": lambda: report().table(layer="("),
    "layer 3": lambda: report().table(layer=3),
    "text layer (": lambda: report().text("("),
    "to_json layer (": lambda: report().to_json("("),
    "on A100": lambda: report().on("A100"),
    "on 3": lambda: report().on(3),
    "quantize a model": lambda: fxquant.quantize_program(OneLinear(), "mxfp8"),
    "quantize a path": lambda: fxquant.quantize_program("model.pt2", "mxfp8"),
    "quantize None": lambda: fxquant.quantize_program(None, "mxfp8"),
    "quantize program misspelled": lambda: fxquant.quantize_program(program(), "mxpf8"),
    "quantize program delayed": lambda: fxquant.quantize_program(program(), "delayed_scaling"),
    "quantize program nothing": lambda: fxquant.quantize_program(
        torch.export.export(nn.ReLU(), (x(),)), "mxfp8"
    ),
    "quantize program twice": lambda: fxquant.quantize_program(
        fxquant.quantize_program(program(), "mxfp8"), "mxfp8"
    ),
    "calibration a tensor": lambda: fxquant.quantize_program(program(), "current_scaling", calibration=x()),
    "calibration empty": lambda: fxquant.quantize_program(program(), "current_scaling", calibration=[]),
    "Calibration()": lambda: fxquant.Calibration(),
    "Calibration of a method": lambda: fxquant.Calibration([x()], method="max"),
    "Amax by position": lambda: fxquant.Amax("percentile", 99),
    "Amax misspelled": lambda: fxquant.Amax(percent=99),
    "diff of one": lambda: fxquant.diff(report()),
    "diff of models": lambda: fxquant.diff(OneLinear(), OneLinear()),
    "calibration overrides a list": lambda: fxquant.Calibration([x()], overrides=["fc"]),
    "load None": lambda: fxquant.Report.load(None),
    "a decision that is a number": lambda: fxquant.Report.from_json(
        json.dumps({**json.loads(report().to_json()), "decisions": [3]})
    ),
    "log to no path": lambda: log().to_csv(None),
    "log to a folder": lambda: log().to_jsonl("/"),
    "log to no folder": lambda: log().to_csv("absent/log.csv"),
    "plot to no folder": lambda: log().plot("absent/log.png"),
    "precompute_scales(None)": lambda: fxquant.precompute_scales(None),
    "payload_state_dict(None)": lambda: fxquant.payload_state_dict(None),
    "an opset in words": lambda: fxquant.onnx_export(
        fxquant.quantize_program(program(), "rowwise"), opset_version="21"
    ),
    "inductor_configs in a list": lambda: fxquant.aoti_compile_and_package(
        fxquant.quantize_program(program(), "rowwise"), package_path="model.pt2", inductor_configs=["max_autotune"]
    ),
    "prepare_fsdp(None)": lambda: fxquant.prepare_fsdp(None, "mxfp8"),
    "calibration wrong shape": lambda: fxquant.quantize_program(
        program(), "current_scaling", calibration=[(x(32, 63),)]
    ),
    "Decision()": lambda: fxquant.Decision(),
    "Decision of a number": lambda: fxquant.Decision(role=3, gemm="fprop", direction="rowwise", shape=()),
    "Report()": lambda: fxquant.Report(),
    "report_of a model": lambda: fxquant.report_of(OneLinear()),
    "report_of a plain program": lambda: fxquant.report_of(program()),
    "lower a model": lambda: fxquant.lower_program(OneLinear()),
    "package a model": lambda: fxquant.aoti_compile_and_package(OneLinear()),
    "onnx of a plain program": lambda: fxquant.onnx_export(program(), "absent/model.onnx"),
    "onnx of nvfp4": lambda: fxquant.onnx_export(
        fxquant.quantize_program(program(), "nvfp4_1d"), "model.onnx"
    ),
    "loss_table(most=..)": lambda: fxquant.Report(recipe="mxfp8", decisions=[]).loss_table(most="all"),
    "table(collapse=..)": lambda: fxquant.Report(recipe="mxfp8", decisions=[]).table(collapse="yes"),
    "explain a wrong shape": lambda: fxquant.explain(OneLinear(), "mxfp8", x(32, 63)),
    "explain a text": lambda: fxquant.explain(OneLinear(), "mxfp8", "x"),
    "explain nothing": lambda: fxquant.explain(OneLinear(), "mxfp8"),
    "measure a wrong shape": lambda: fxquant.measure(OneLinear(), "mxfp8", x(32, 63)),
    "measure a wrong keyword": lambda: fxquant.measure(OneLinear(), "mxfp8", x(), y=1),
    "bisect a wrong shape": lambda: fxquant.bisect(OneLinear(), x(32, 63), "mxfp8"),
    "search a wrong shape": lambda: fxquant.search(OneLinear(), x(32, 63)),
}  # fmt: skip
NAMES: dict[str, Call] = {
    "fp8_autocast": lambda: fxquant.fp8_autocast,
    "convert_to_float8_training": lambda: fxquant.convert_to_float8_training,
    "quantize_": lambda: fxquant.quantize_,
    "Linear": lambda: fxquant.Linear,
    "a recipe's class, misspelled": lambda: fxquant.recipes.MXFP8BlockScalin,
    "a recipe as an attribute": lambda: fxquant.recipes.float8_blockwise,
    "a format in small letters": lambda: fxquant.Format.e4m3,
    "a GEMM as an attribute": lambda: fxquant.Gemm.fprop,
    "a direction in short": lambda: fxquant.Direction.row,
    "a dtype without its k": lambda: fxquant.DType.Float8E4M3,
    "a misspelled name": lambda: fxquant.MXFP8Quantiser,
}
INPUTS = {"compile": COMPILE, "options": OPTIONS, "recipes": RECIPES, "quantizers": QUANTIZERS, "tools": TOOLS}
ROWS = [(f"{group}: {name}", call) for group, calls in INPUTS.items() for name, call in calls.items()]

KNOWN: dict[str, str] = {}
"""What gives something else than one sentence of this package's, and why."""


@pytest.mark.parametrize(("name", "call"), ROWS, ids=[name for name, _ in ROWS])
def test_a_wrong_input_gets_one_sentence(
    name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    if name in KNOWN:
        pytest.skip(KNOWN[name])
    with pytest.raises(FxQuantError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and 10 < len(text) < 600 and type(caught.value).__module__ == "fxquant.errors", text
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_there_is_not_is_told_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError, match=r"('fxquant.* has no attribute|[A-Z]\w+ has no) .*(write|did you mean) "):
        NAMES[name]()


def test_what_gives_something_else_are_few() -> None:
    assert len(ROWS) > 108 and len(KNOWN) <= 5 and KNOWN.keys() <= dict(ROWS).keys()
