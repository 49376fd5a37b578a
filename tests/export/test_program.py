"""Exported programs: the bits of the compiled path, weights as payloads in the state, and files that load elsewhere."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import NAMES, OneWeight, TwoLinears, compiled, hybrid, per_role, train_step
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxquant
from fxquant import (
    Amax,
    Calibration,
    CustomRecipe,
    Float8BlockQuantizer,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8RowwiseScaling,
    FxQuantError,
    FxQuantWarning,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    OptionError,
    ProgramError,
    Quantizer,
    QuantizerRole,
    Recipe,
    RecipeError,
    UnquantizedWarning,
    UnusedRuleWarning,
    aoti_compile_and_package,
    lower_program,
    quantize_program,
    recipes,
    report_of,
)
from fxquant.compat import torch_version
from fxquant.roles import Direction


class Block(nn.Module):
    """What a decoder block does to its input: shared operands, 3-D activations, a residual and a gate."""

    def __init__(self, width: int = 64, inner: int = 96) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        attention = torch.nn.functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        x = x + self.out(attention)
        return x + self.down(self.up(x) * self.gate(x).sigmoid())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def block() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Block().eval(), torch.randn(4, 8, 64)


@functools.cache
def block_program(decomposed: bool = False) -> ExportedProgram:
    """The program of `block`, of any batch. No test changes it: `test_the_original_stays_as_it_is`."""
    return block_program().run_decompositions() if decomposed else exported(*block())


@functools.cache
def quantized_block(recipe: str, decomposed: bool = False) -> ExportedProgram:
    """The program of `block` under a recipe, which tests read alone."""
    return quantize_program(block_program(decomposed), recipe)


@functools.cache
def lowered_block(recipe: str) -> ExportedProgram:
    return lower_program(quantized_block(recipe))


@functools.cache
def one_layer() -> tuple[nn.Module, Tensor, ExportedProgram]:
    """A layer, an input and their program, which tests read alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    return model, x, exported(model, x)


def exported(model: nn.Module, *args: Tensor, dynamic: bool = True) -> ExportedProgram:
    shapes = tuple({0: Dim("batch", min=2, max=64)} for _ in args) if dynamic else None
    return export(model, args, dynamic_shapes=shapes)


def both(model: nn.Module, *args: Tensor, dynamic: bool = True) -> tuple[ExportedProgram, ExportedProgram]:
    """A program, and the same one decomposed."""
    program = exported(model, *args, dynamic=dynamic)
    return program, program.run_decompositions()


def run(program: ExportedProgram, *args: Any) -> Tensor:
    with torch.no_grad():
        return program.module()(*args)


def ops(program: ExportedProgram) -> list[str]:
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("recipe", NAMES)
def test_program_has_the_bits_of_the_compiled_model(recipe: str) -> None:
    model, _ = block()
    programs = [quantized_block(recipe, decomposed) for decomposed in (False, True)]
    # decomposing takes attention apart as the kernel of this name does
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for size in (4, 7):
            x = torch.randn(size, 8, 64)
            want = compiled(model, recipe, dynamic=False)(x)
            assert all(torch.equal(run(program, x), want) for program in programs)
    for program in programs:
        program.validate()


def test_a_program_calls_the_kernel_of_attention_that_the_model_does() -> None:
    model, x = block()
    with torch.no_grad():
        assert torch.equal(run(quantized_block("current_scaling"), x), compiled(model, "current_scaling")(x))


@pytest.mark.parametrize("recipe", NAMES)
def test_weights_are_stored_as_their_quantizer_makes_them(recipe: str) -> None:
    model, _ = block()
    program = quantized_block(recipe)
    quantizer = recipes.get(recipe).quantizer(QuantizerRole("linear", "weight"))
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        parts = quantizer.quantize(layer.weight, columnwise=False).rowwise
        assert f"{name}.weight" not in program.state_dict
        data = program.state_dict[f"{name}.weight_data"]
        assert torch.equal(data.view(torch.uint8)[..., : parts.data.shape[-1]], parts.data.view(torch.uint8)), name
        scale = program.state_dict[f"{name}.weight_scale"]
        assert torch.equal(scale.view(torch.uint8), parts.scale.view(torch.uint8)), name
        if parts.global_amax is not None:
            assert torch.equal(program.state_dict[f"{name}.weight_global_amax"], parts.global_amax)


def test_files_shrink_with_the_weights() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    program = exported(Wide(), torch.randn(4, 512))
    sizes = {}
    for name in (None, *NAMES):
        file = io.BytesIO()
        torch.export.save(program if name is None else quantize_program(program, name), file)
        sizes[name] = len(file.getvalue())
    overhead = 150_000
    bytes_per_element = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
    for name in NAMES:
        assert sizes[name] < sizes[None] * bytes_per_element.get(name, 1.01) / 4 + overhead, name


def test_shared_inputs_are_quantized_once() -> None:
    for decomposed in (False, True):
        program = quantized_block("mxfp8", decomposed)
        assert ops(program).count("fxquant.scaled_mm.default") == 7
        assert ops(program).count("fxquant.quantize.default") == 4  # of h, the attention, x and the gated product


@pytest.mark.parametrize("batch_axes", [1, 2])
def test_a_weight_that_is_expanded_to_a_dynamic_batch_is_stored(batch_axes: int) -> None:
    """As `linear` of a tensor with gaps is decomposed by torch."""

    class Expanded(OneWeight):
        def forward(self, x: Tensor) -> Tensor:
            batch = x.shape[:-2]
            weight = self.weight.t().expand(*batch, -1, -1).reshape(-1, 64, 32)
            return torch.bmm(x.reshape(-1, *x.shape[-2:]), weight).reshape(*batch, -1, 32)

    model, x = Expanded(32, 64), torch.randn(4, *[3] * (batch_axes - 1), 8, 64)
    program = quantize_program(exported(model, x), "mxfp8")
    assert set(program.state_dict) == {"weight_data", "weight_scale"}
    assert torch.equal(run(program, x), compiled(lambda x: F.linear(x, model.weight), "mxfp8")(x))


def test_the_original_stays_as_it_is() -> None:
    model, x = block()
    program = exported(model, x)
    text, keys, signature = str(program), list(program.state_dict), copy.deepcopy(program.graph_signature)
    metas = [sorted(map(str, node.meta)) for node in program.graph.nodes]
    tensors = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    quantize_program(program, "mxfp8", calibration=Calibration([x], progress=False))
    quantize_program(program, "mxfp8", fold_weights=False)
    assert str(program) == text and list(program.state_dict) == keys and program.graph_signature == signature
    assert [sorted(map(str, node.meta)) for node in program.graph.nodes] == metas
    assert all(torch.equal(program.state_dict[name], tensor) for name, tensor in tensors.items())
    program.validate()


def test_decisions_and_names_are_those_of_the_compiled_model() -> None:
    model, x = block()
    with torch.no_grad():
        wanted = fxquant.explain(model, "mxfp8", x).decisions
    for program in both(model, x, dynamic=False):
        found = report_of(quantize_program(program, "mxfp8")).decisions
        rows = [
            [(d.layer, d.gemm, d.role.tensor_type, d.shape) for d in each if d.quantizer is not None]
            for each in (found, wanted)
        ]
        assert rows[0] == rows[1]


def test_new_nodes_keep_their_modules() -> None:
    program = quantized_block("mxfp8")
    paths = {
        [path for path, _ in node.meta["nn_module_stack"].values()][-1]
        for node in program.graph.nodes
        if str(node.target) == "fxquant.scaled_mm.default"
    }
    assert paths == {"q", "k", "v", "out", "up", "gate", "down"}


@pytest.mark.parametrize("recipe", ["current_scaling", NVFP4BlockScaling(disable_stochastic_rounding=True)], ids=str)
def test_unfolded_weights_train_as_the_compiled_model_does(recipe: Recipe | str) -> None:
    model, x = block()
    program = quantize_program(block_program(), recipe, fold_weights=False)
    program.validate()
    assert set(program.state_dict) == set(model.state_dict())
    module = program.module()
    got = train_step(module, module, x)
    wanted = train_step(model, compiled(model, recipe), x)
    assert got.keys() == wanted.keys()
    assert torch.equal(got["output"], wanted["output"])
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-3, atol=1e-4 * grad.abs().max().item(), msg=name)
    gemms = {str(d.gemm) for d in report_of(program).decisions if d.quantizer is not None}
    assert gemms == {"fprop", "dgrad", "wgrad"}


def test_a_joint_program_is_made_of_a_quantized_one() -> None:
    """Loss and gradients in one program: those of the compiled model."""
    joint = importlib.import_module("torch.export.experimental")._export_forward_backward

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 32)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return torch.nn.functional.mse_loss(self.b(self.a(x).relu()), target)

    torch.manual_seed(0)
    model, inputs = Loss(), (torch.randn(16, 64), torch.randn(16, 32))
    source = export(model, inputs)
    program = joint(quantize_program(source, "current_scaling", fold_weights=False))
    program.validate()
    assert ops(program).count("fxquant.scaled_mm.default") == 5
    state = [program.state_dict[name] for name in program.graph_signature.parameters]
    loss, *grads = program.graph_module(*state, *inputs)
    compiled(model, "current_scaling")(*inputs).backward()
    assert loss.isfinite() and len(grads) == 4
    for spec, grad in zip(program.graph_signature.output_specs[1:], grads, strict=True):
        torch.testing.assert_close(grad, model.get_parameter(spec.target).grad, rtol=1e-4, atol=1e-6)
    refused(
        ProgramError, "quantize the forward with fold_weights=False", lambda: quantize_program(joint(source), "mxfp8")
    )


def test_a_tied_weight_keeps_its_original_for_what_else_reads_it() -> None:
    model, ids = Tied().eval(), torch.randint(0, 96, (4, 8))
    program = quantize_program(exported(model, ids), "mxfp8")
    assert torch.equal(program.state_dict["head.weight"], model.embed.weight)
    assert "head.weight_data" in program.state_dict and "body.weight" not in program.state_dict
    details = {d.layer: d.detail for d in report_of(program).decisions if d.role.tensor_type == "weight"}
    assert details["head"].endswith("and the original head.weight for embedding")
    assert "original" not in details["body"]
    with torch.no_grad():
        assert torch.equal(run(program, ids), compiled(model, "mxfp8")(ids))


class Packed(nn.Module):
    """Weights that are parts of one parameter, under names that the stored ones would have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(192, 64) / 8)
        self.register_buffer("weight_data", torch.ones(64))
        self.layer = nn.Linear(64, 64, bias=False)
        self.layer_weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.register_buffer("layer_weight_scale", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.weight.split([64, 128])
        k, v = kv.chunk(2)
        y = sum(nn.functional.linear(x, each) for each in (q, k, v, self.layer_weight))
        return self.layer(x) + y + self.weight_data + self.layer_weight_scale


def test_parts_of_one_weight_are_stored() -> None:
    torch.manual_seed(0)
    for packed in both(Packed(), x := torch.randn(4, 64)):
        program = quantize_program(packed, "mxfp8")
        details = [d.detail for d in report_of(program).decisions if d.role.tensor_type == "weight"]
        assert len(details) == 5 and all("stored in" in detail for detail in details)
        assert not {"weight", "layer.weight", "layer_weight"} & set(program.state_dict)
        assert torch.equal(run(reload(program), x), run(quantize_program(packed, "mxfp8", fold_weights=False), x))


def test_a_deep_model_with_a_tied_embedding() -> None:
    """Each residual doubles the ways from the embedding, which stays, to the result."""

    class Deep(Tied):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for _ in range(32):
                x = x + self.body(x).tanh() / 8
            return self.head(x)

    torch.manual_seed(0)
    deep = exported(Deep(), ids := torch.arange(96).view(4, 24), dynamic=False)
    program = quantize_program(deep, "mxfp8")
    assert {"embed.weight", "head.weight"} & set(program.state_dict) and "body.weight" not in program.state_dict
    assert (run(program, ids) - run(deep, ids)).norm() < 0.1 * run(deep, ids).norm()


def test_a_weight_tied_between_linears_goes_away_under_both_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    program = quantize_program(exported(Twice(), torch.randn(4, 64)), "mxfp8")
    assert len(program.state_dict) == 2 and not any(name.endswith("weight") for name in program.state_dict)


class Branches(nn.Module):
    """A weight inside a conditional, inside a region without gradients, and at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x).relu(), (x,))
        with torch.no_grad():
            y = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.b(x)
        return x + y + z.float()


@functools.cache
def branches() -> tuple[ExportedProgram, ExportedProgram]:
    torch.manual_seed(0)
    return both(Branches().eval(), torch.randn(4, 64))


@pytest.mark.parametrize("which", [0, 1], ids=["training_ir", "decomposed"])
def test_nested_graphs(which: int) -> None:
    source = branches()[which]
    program = quantize_program(source, "current_scaling")
    assert not {"a.weight", "b.weight"} & set(program.state_dict)
    assert {d.layer for d in report_of(program).decisions} == {"a", "b"}
    for x in (torch.rand(4, 64), -torch.rand(7, 64)):
        want = run(source, x)
        assert 0 < (run(program, x) - want).norm() < 0.1 * want.norm()
    still = quantize_program(source, "current_scaling", calibration=Calibration([torch.rand(4, 64)], progress=False))
    branch = "in a branch of torch.cond: one of its branches runs"
    never = f"{branch}; dynamic: no calibration input came here"
    assert [d.layer for d in report_of(still).decisions if d.detail == never] == ["b"]
    assert sum("input_multiplier" in name for name in still.state_dict) == 3
    x = torch.rand(4, 64)
    reloaded = reload(still)
    assert torch.equal(run(reloaded, x), run(still, x))


class Within(nn.Module):
    """One linear inside a higher-order op, or inside two of them."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.layer = op, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.op == "while_loop":
            start = (torch.tensor(0), x)
            return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.layer(y).tanh()), start)[1]
        if self.op == "map":
            return torch._higher_order_ops.map(self.layer, x.unflatten(0, (2, 2)))
        if self.op == "scan":
            return torch._higher_order_ops.scan(lambda c, y: ((z := self.layer(c) + y), z.clone()), x[0], x, dim=0)[1]
        if self.op == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
        inner = lambda x: torch.cond(x.mean() > 0.5, self.layer, lambda x: self.layer(x) * 2, (x,))  # noqa: E731
        return torch.cond(x.sum() > 0, inner, lambda x: x - 1, (x,))


@pytest.mark.parametrize("op", ["while_loop", "map", "scan", "checkpoint", "nested"])
def test_weights_and_scales_inside_higher_order_ops(op: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 64)
    for source in both(Within(op).eval(), x, dynamic=False):
        program = quantize_program(source, "current_scaling", calibration=Calibration([x], progress=False))
        names = {name.removeprefix("layer.").rstrip("_1") for name in program.state_dict}
        assert names == {"bias", "weight_data", "weight_scale", "input_multiplier"}
        assert {d.layer for d in report_of(program).decisions} == {"layer"}
        got, want = run(program, x), run(source, x)
        assert 0 < (got - want).norm() < 0.1 * want.norm()
        assert torch.equal(run(reload(program), x), got)


def reload(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def test_state_that_the_program_writes() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("weight", torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            self.weight.mul_(0.5)
            return torch.nn.functional.linear(self.layer(x), self.weight)

    torch.manual_seed(0)
    x = torch.randn(4, 64)
    for which in (0, 1):
        counts = both(Counts(), x)[which]  # which run on the same state
        program = quantize_program(counts, "current_scaling", calibration=Calibration([x, x], progress=False))
        assert counts.state_dict["calls"] == 0, "calibration changes a copy"
        assert "layer.weight" not in program.state_dict and "weight" in program.state_dict
        module = program.module()
        first, second = module(x), module(x)
        assert module.calls == 2
        torch.testing.assert_close(second, first / 2, rtol=0.2, atol=0.05)


def test_weights_that_are_no_constants_are_quantized_in_every_call() -> None:
    class Computed(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.a.weight + 0
            weight.mul_(2)
            scaled = self.b.weight * x.abs().mean()
            return torch.nn.functional.linear(torch.nn.functional.linear(x, weight), scaled)

    torch.manual_seed(0)
    model, x = Computed(64).eval(), torch.randn(4, 64)
    program = quantize_program(exported(model, x), "mxfp8")
    with torch.no_grad():
        assert torch.equal(run(program, x), compiled(model, "mxfp8")(x))
    details = [d.detail for d in report_of(program).decisions if d.role.tensor_type == "weight"]
    assert details == ["quantized in every call"] * 2
    assert {"a.weight", "b.weight"} <= set(program.state_dict)


def test_a_cast_weight_leaves_nothing_behind() -> None:
    class Cast(OneWeight):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x.bfloat16(), self.weight.to(torch.bfloat16))

    model, x = Cast(96, 64).eval(), torch.randn(4, 64)
    with torch.no_grad():
        want = compiled(model, "mxfp8")(x)
    for cast in both(model, x):
        program = quantize_program(cast, "mxfp8")
        assert set(program.state_dict) == {"weight_data", "weight_scale"}
        assert torch.equal(run(program, x), want)


def test_a_weight_made_from_others_is_stored_in_their_place() -> None:
    model, x = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 96))).eval(), torch.randn(4, 64)
    program = quantize_program(exported(model, x), "mxfp8")
    assert not any("original" in name for name in program.state_dict), list(program.state_dict)
    weight = MXFP8Quantizer().quantize(model[0].weight, columnwise=False).rowwise
    stored = next(tensor for name, tensor in program.state_dict.items() if name.endswith("weight_data"))
    assert torch.equal(stored.view(torch.uint8), weight.data.view(torch.uint8))


class Levels(Quantizer):
    """Codes of the nearest of five levels, with a scale for each row."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> Any:
        def half(y: Tensor) -> fxquant.quantizers.QuantizedOperand:
            scale = y.abs().amax(1, keepdim=True).float()
            levels = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
            codes = ((y / scale).unsqueeze(-1) - levels).abs().argmin(-1).to(torch.int8)
            return fxquant.quantizers.QuantizedOperand(codes, scale)

        return fxquant.QuantizedTensor(half(x) if rowwise else None, half(x.mT) if columnwise else None)

    def dequantize(self, operand: Any) -> Tensor:
        return (operand.data.float() - 2) / 2 * operand.scale


class Dithered(Levels):
    """With noise in front, which is another in every call."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True) -> Any:
        return super().quantize(x + 0.1 * torch.rand_like(x), rowwise=rowwise, columnwise=columnwise)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 96)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def test_a_quantizer_of_the_users_own_has_its_weights_stored(tmp_path: Path) -> None:
    model, x = Twice().eval(), torch.randn(8, 64)
    recipe = per_role(input=MXFP8Quantizer(), weight=Levels(), grad_output=IdentityQuantizer())
    with torch.no_grad():
        want = compiled(model, recipe)(x)
    for twice in both(model, x):
        program = quantize_program(twice, recipe)
        program.validate()
        assert torch.equal(run(program, x), want)
        codes = {name: t for name, t in program.state_dict.items() if t.dtype == torch.int8}
        assert sorted(tuple(t.shape) for t in codes.values()) == [(64, 64), (96, 64)], "one for both that share it"
        names = {name.removesuffix("_data") for name in codes}
        assert "last.weight" in names and not names & set(program.state_dict), "the originals are gone"
        for name in names:
            made = Levels().quantize(model.get_parameter(name).detach(), columnwise=False).rowwise
            assert torch.equal(codes[f"{name}_data"], made.data)
            assert torch.equal(program.state_dict[f"{name}_scale"], made.scale)
        details = [d.detail for d in report_of(program).decisions if d.role.tensor_type == "weight"]
        first = f"stored in {64 * 64 + 64 * 4} bytes instead of {64 * 64 * 4}"
        assert details == [first, first, f"stored in {96 * 64 + 96 * 4} bytes instead of {96 * 64 * 4}"]
    torch.testing.assert_close(run(lower_program(program), x), want)
    torch.export.save(program, tmp_path / "model.pt2")
    assert torch.equal(run(torch.export.load(tmp_path / "model.pt2"), x), want)


def test_graphs_inside_share_what_a_quantizer_of_the_users_own_made() -> None:
    class Frozen(TwoLinears):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).relu()
            with torch.no_grad():
                z = self.b(self.a(x + 1))
            return y * z

    model, x = Frozen(64).eval(), torch.randn(8, 64)
    recipe, source = per_role(input=Levels(), weight=Levels(), grad_output=Levels()), torch.export.export(model, (x,))
    program = quantize_program(source, recipe)
    program.validate()
    stored = {f"{name}.{part}" for name in "ab" for part in ("weight_data", "weight_scale", "bias")}
    assert set(program.state_dict) == stored | {"constant_0"}
    assert torch.equal(run(program, x), run(quantize_program(source, recipe, fold_weights=False), x))


def test_a_weight_whose_quantizer_is_no_function_of_it_is_not_stored_and_says_why() -> None:
    model, x = nn.Sequential(nn.Linear(64, 96)).eval(), torch.randn(8, 64)
    recipe = per_role(input=Levels(), weight=Dithered(), grad_output=IdentityQuantizer())
    program = quantize_program(exported(model, x), recipe)
    assert set(program.state_dict) >= {"0.weight", "0.bias"} and run(program, x).isfinite().all()
    (detail,) = (d.detail for d in report_of(program).decisions if d.role.tensor_type == "weight")
    assert detail == "quantized in every call: rand_like draws random numbers"


class Chosen(nn.Module):
    """Rows that a mask chooses: their number is known only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x[x[:, 0] > 0]).relu())


def test_a_number_of_rows_that_depends_on_data() -> None:
    model, x = Chosen(), torch.randn(16, 64)
    whole = quantize_program(exported(nn.Sequential(model.up, nn.ReLU(), model.down), x), "mxfp8")
    values = (x, -x, torch.full_like(x, -1))
    chosen = [value[value[:, 0] > 0] for value in values]
    wants = [run(whole, rows) if len(rows) > 1 else torch.empty(0, 64) for rows in chosen]
    for masked in both(model, x, dynamic=False):
        program = quantize_program(masked, "mxfp8")
        program.validate()
        lower = lower_program(program)
        for value, want in zip(values, wants, strict=True):
            assert torch.equal(run(program, value), want) and torch.equal(run(lower, value), want)


def test_projections_of_attention_have_the_names_of_the_compiled_model() -> None:
    for model, widths in (
        (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (64,)),
        (nn.MultiheadAttention(64, 4, kdim=32, vdim=48), (64, 32, 48)),
    ):
        inputs = [torch.randn(2, 8, width) for width in widths]
        wanted = {d.layer for d in fxquant.explain(model.eval(), "mxfp8", *inputs).decisions}
        assert any("out_proj" in name for name in wanted)
        for each in both(model, *inputs, dynamic=False):
            assert {d.layer for d in report_of(quantize_program(each, "mxfp8")).decisions} == wanted


def test_signatures_of_modules_stay_those_of_their_tensors() -> None:
    model, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval(), torch.randn(2, 8, 64)
    layer = export(model, (x,), preserve_module_call_signature=("self_attn", "linear1", "linear2"))
    whole = quantize_program(layer, "mxfp8")
    for program in (whole, lower_program(whole)):
        program.validate()
        parts = torch.export.unflatten(program)
        assert torch.equal(parts(x), run(program, x))
        linear = dict(parts.named_modules())["linear2"]
        y = torch.randn(2, 8, 128)
        assert 0 < (linear(y) - model.linear2(y)).norm() < 0.1 * model.linear2(y).norm()


class Sinks(nn.Module):
    """Attention by hand with sinks and a mask, the largest score subtracted first; its index is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.sinks = nn.Linear(64, 192), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, 4, 16).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
        scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, length, -1)], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return torch.matmul(scores.softmax(-1)[..., :-1], v)


def test_attention_by_hand_is_quantized_as_in_the_compiled_model() -> None:
    torch.manual_seed(0)
    model, x, recipe = Sinks(), torch.randn(2, 32, 64), Float8CurrentScaling(fp8_dpa=True)
    mask = torch.full((32, 32), -torch.inf).triu(1).expand(2, 1, 32, 32)
    with torch.no_grad():
        want = compiled(model, recipe)(x, mask)
    for sinks in both(model, x, mask, dynamic=False):
        program = quantize_program(sinks, recipe)
        assert of_attention(program) == 4
        assert torch.equal(run(program, x, mask), want)
        assert torch.equal(run(lower_program(program), x, mask), want)


def of_attention(program: ExportedProgram) -> int:
    """How many operands of attention are quantized."""
    return sum(d.role.module_type == "dpa" and d.quantizer is not None for d in report_of(program).decisions)


class Grouped(nn.Module):
    """Grouped-query attention, fused or by hand as models of old write it, for queries of any batch and length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(64, 192), kind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 8, 24).transpose(1, 2).split((4, 2, 2), 1)
        if self.kind == "causal":
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.kind == "masked":
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=0.25)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        if self.kind == "by hand":
            return (q @ k.mT / 4 + mask).softmax(-1) @ v
        q, k, v = (each.reshape(batch * 4, length, 24) for each in (q, k, v))
        scores = torch.bmm(q * 0.25, k.transpose(1, 2)).view(batch, 4, length, length) + mask
        return torch.bmm(scores.softmax(-1).view(batch * 4, length, length), v).view(batch, 4, length, 24)


SCALINGS = {"tensor": Float8CurrentScaling(fp8_dpa=True), "heads": Float8RowwiseScaling(fp8_dpa=True)}
ALWAYS = [("causal", "tensor"), ("masked", "heads"), ("by hand", "tensor"), ("bmm", "heads")]
"""Kinds of attention and their scaling; the others are for `make sweep`."""


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(kind, recipe, id=f"{kind}-{name}", marks=[] if (kind, name) in ALWAYS else pytest.mark.sweep)
        for kind, _ in ALWAYS
        for name, recipe in SCALINGS.items()
    ],
)
@pytest.mark.skipif(torch_version() < (2, 13), reason="torch 2.11 does not export it with a length of any size")
def test_decomposed_attention_takes_every_batch_and_length(kind: str, recipe: Recipe) -> None:
    """Found with its heads, so that scales and kernels are those of the program that was not decomposed."""
    torch.manual_seed(0)
    model, x, mask = Grouped(kind), torch.randn(3, 32, 64), torch.randn(3, 1, 32, 32)
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=512)
    grouped = export(model, (x, mask), dynamic_shapes=({0: batch, 1: length}, {0: batch, 2: length, 3: length}))
    decomposed = quantize_program(grouped.run_decompositions(), recipe)
    program = quantize_program(grouped, recipe)
    for each in (program, decomposed):
        assert of_attention(each) == 4
        (keys,) = (node.args[1][0] for node in each.graph.nodes if "attention_forward" in str(node.target))
        assert keys.meta["val"].shape[1] == 2 and keys.meta["val"].ndim == 4
        assert not any(node.op == "call_function" and not node.users for node in each.graph.nodes)
    lower = lower_program(decomposed) if kind in ("masked", "by hand") else None  # what the others are lowered to
    for rows, columns in ((2, 32), (5, 17)):
        given = torch.randn(rows, columns, 64), torch.randn(rows, 1, columns, columns)
        assert torch.equal(run(decomposed, *given), run(program, *given))
        assert lower is None or torch.equal(run(lower, *given), run(program, *given))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, 4, 16).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "recipe",
    [MXFP8BlockScaling(fp8_dpa=True), pytest.param(Float8CurrentScaling(fp8_dpa=True), marks=pytest.mark.sweep)],
    ids=str,
)
def test_attention_takes_lengths_that_are_no_multiple_of_its_blocks(recipe: Recipe) -> None:
    """How a padded tensor of the example lies in memory holds the program to nothing."""
    model, x = Causal(), torch.randn(2, 32, 64)
    shapes = ({0: Dim("batch", max=64), 1: Dim("length", min=2, max=512)},)
    source = export(model, (x,), dynamic_shapes=shapes)
    program = quantize_program(source, recipe)
    lowered = lower_program(program)
    y = torch.randn(3, 33, 64)
    with torch.no_grad():
        assert torch.equal(run(program, y), compiled(model, recipe)(y))
    for each in (y, torch.randn(1, 80, 64)):
        assert torch.equal(run(lowered, each), run(program, each))
        assert run(source, each).shape == run(program, each).shape


def test_a_recurrent_layer_is_in_the_report() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    program = quantize_program(exported(Recurrent(), torch.randn(8, 64), dynamic=False), "mxfp8")
    assert {(d.layer, str(d.skip_reason)) for d in report_of(program).decisions} == {
        ("lstm", "OPAQUE"), ("head", "None"),
    }  # fmt: skip
    lstm = exported(nn.LSTM(64, 64), torch.randn(8, 64), dynamic=False)
    refused(ProgramError, "lstm is not a form that can be rewritten", lambda: quantize_program(lstm, "mxfp8"))


def test_recipes_that_mix() -> None:
    _, x = block()
    mixed = per_role(
        input=hybrid(MXFP8Quantizer(), NVFP4Quantizer()),
        weight=hybrid(MXFP8Quantizer(), NVFP4Quantizer()),
        grad_output=NVFP4Quantizer(),
    )
    recipe = CustomRecipe(qfactory=lambda r: mixed.quantizer(r) if r.module_type == "linear" else IdentityQuantizer())
    assert torch.equal(run(quantize_program(block_program(), recipe), x), run(quantized_block("mxfp8"), x))


def test_names_kwargs_and_structures_of_the_signature() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, input: Tensor, *, scale: Tensor) -> dict[str, Any]:
            y = self.layer(input)
            return {"y": y, "both": (y * scale, input), "n": 3}

    model, x = Named(), torch.randn(4, 64)
    source = export(model, (x,), {"scale": torch.ones(1)}, preserve_module_call_signature=("layer",))
    program = quantize_program(source, "mxfp8")
    program.validate()
    out = program.module()(x, scale=torch.full((1,), 2.0))
    assert torch.equal(out["both"][0], 2 * out["y"]) and out["n"] == 3 and torch.equal(out["both"][1], x)
    flat = torch.export.unflatten(reload(program))
    assert torch.equal(flat(x, scale=torch.ones(1))["y"], out["y"])


FRESH = """
import sys, torch
{imports}
program, x, y = (torch.export.load(sys.argv[1]), *torch.load(sys.argv[2]))
with torch.no_grad():
    assert torch.equal(program.module()(x), y)
print([m for m in sys.modules if m.partition(".")[0] == "fxquant"][:1])
{then}
"""

KNOWN = """
from fxquant.kernels.operator import operator_of
named = [node.target for node in program.graph.nodes if "fxquant" in str(node.target)]
assert named and all(map(operator_of, named)), named
"""


def fresh(code: str, *args: Any) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_saved_program_loads_in_another_process(tmp_path: Path) -> None:
    _, x = block()
    program = quantized_block("nvfp4")
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, run(program, x)), tmp_path / "data.pt")
    fresh(FRESH.format(imports="import fxquant", then=KNOWN), tmp_path / "model.pt2", tmp_path / "data.pt")


def test_a_lowered_program_loads_where_fxquant_is_not(tmp_path: Path) -> None:
    _, x = block()
    for recipe in NAMES:
        program = lowered_block(recipe)
        program.validate()
        assert not any(op.startswith("fxquant") for op in ops(program))
        for size in (4, 7):
            batch = torch.randn(size, 8, 64)
            torch.testing.assert_close(run(program, batch), run(quantized_block(recipe), batch), rtol=1e-5, atol=1e-5)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, run(program, x)), tmp_path / "data.pt")
    out = fresh(
        FRESH.format(imports="sys.modules['fxquant'] = None", then=""), tmp_path / "model.pt2", tmp_path / "data.pt"
    )
    assert out == "['fxquant']"  # the None that keeps it from being imported


# calibration


def calibrated(of: ExportedProgram, *inputs: Any, recipe: Any = "current_scaling", **settings: Any) -> ExportedProgram:
    return quantize_program(of, recipe, calibration=Calibration(inputs, progress=False, **settings))


def multipliers(program: ExportedProgram) -> dict[str, float]:
    ends = ".input_multiplier"
    return {k.removesuffix(ends): v.item() for k, v in program.state_dict.items() if k.endswith(ends)}


def test_scales_of_one_input_are_those_that_it_would_get_by_itself() -> None:
    _, x = block()
    for recipe in ("current_scaling", "delayed_scaling", "nvfp4"):
        program = calibrated(block_program(), x, recipe=recipe)
        dynamic = quantized_block("nvfp4" if recipe == "nvfp4" else "current_scaling")
        assert torch.equal(run(program, x), run(dynamic, x))
        lower = lower_program(program)
        if recipe == "nvfp4":
            amaxes = [node for node in lower.graph.nodes if str(node.target).startswith("aten.amax")]
            assert amaxes and all(node.args[1] == [-1] for node in amaxes), "of blocks alone"
            assert sum(name.endswith("input_global_amax") for name in program.state_dict) == 4
        else:
            assert not any("amax" in op for op in ops(lower)), "no pass over an activation for its scale"
        assert torch.equal(run(lower, x), run(program, x))
        assert not torch.equal(run(program, 2 * x), run(dynamic, 2 * x))


@pytest.mark.parametrize("recipe", ["current_scaling", "nvfp4", "mxfp8"])
def test_the_report_of_a_calibrated_program_has_no_pass_for_an_amax(recipe: str) -> None:
    _, x = block()
    static, dynamic = calibrated(block_program(), x, recipe=recipe), quantized_block(recipe)
    assert "after its amaxes" not in report_of(static).work_table()
    assert ("after its amaxes" in report_of(dynamic).work_table()) == (recipe != "mxfp8")


def test_methods_of_taking_an_amax() -> None:
    _, x, layer = one_layer()
    inputs = [x, 3 * x, 2 * x]
    amax = x.abs().max().item()
    largest = multipliers(calibrated(layer, *inputs))["0"]
    assert largest == pytest.approx(448 / (3 * amax))
    average = Amax(method="moving_average", momentum=0.75)
    wanted = 0.75 * (0.75 * amax + 0.25 * 3 * amax) + 0.25 * 2 * amax
    assert multipliers(calibrated(layer, *inputs, amax=average))["0"] == pytest.approx(448 / wanted)
    every = torch.cat(inputs).abs().flatten().sort().values
    for percent in (50.0, 99.0, 100.0):
        amax = Amax(method="percentile", percentile=percent)
        found = 448 / multipliers(calibrated(layer, *inputs, amax=amax))["0"]
        exact = every[max(round(len(every) * percent / 100 + 0.4999) - 1, 0)].item()
        assert exact * 0.9999 <= found <= exact * (1 + 1 / 128)


def test_layers_may_have_a_method_of_their_own_or_none() -> None:
    _, x = block()
    overrides = {"down": Amax(method="percentile", percentile=90), "out": None}
    program = calibrated(block_program(), x, overrides=overrides)
    plain, own = multipliers(calibrated(block_program(), x)), multipliers(program)
    assert set(plain) - set(own) == {"out"}
    assert own["down"] > plain["down"] and own["q"] == plain["q"]
    details = {d.layer: d.detail for d in report_of(program).decisions if d.role.tensor_type == "input"}
    assert details["out"] == "dynamic: so the calibration says"
    assert details["down"].endswith("percentile 90 of 1 inputs") and details["down"].startswith("static amax ")


def test_what_a_calibration_does_not_reach_is_told() -> None:
    _, x = block()
    with pytest.warns(UnusedRuleWarning, match=r"calibration of 'dwon' matched no layer") as caught:
        calibrated(block_program(), x, overrides={"dwon": Amax(method="percentile", percentile=90)})
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(FxQuantWarning, match="no input came there with a number in it: scales stay dynamic in "):
        calibrated(block_program(), x * torch.nan)


def test_formats_without_a_tensor_scale_stay_dynamic() -> None:
    _, x = block()
    with pytest.warns(FxQuantWarning, match="calibration has no effect: no activation of mxfp8"):
        program = calibrated(block_program(), x, recipe="mxfp8")
    assert not multipliers(program)
    assert torch.equal(run(program, x), run(quantized_block("mxfp8"), x))
    details = [d.detail for d in report_of(program).decisions if d.role.tensor_type == "input" and d.quantizer]
    assert set(details) == {"dynamic: its scales belong to rows or blocks"}


def test_calibration_inputs_come_in_any_form_and_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _, x, layer = one_layer()
    for inputs in ([x], [(x,)], [[x]], [((x,), {})], (each for each in [x])):
        assert multipliers(quantize_program(layer, "current_scaling", calibration=inputs))
    shown = capsys.readouterr().err
    assert "calibrated on 1 of 1 inputs" in shown and "calibrated on 1 inputs" in shown


def test_calibration_ignores_nan_and_takes_zeros_for_zero() -> None:
    _, x, layer = one_layer()
    nan = torch.full_like(x, torch.nan)
    for method in ("max", "moving_average", "percentile"):
        amax = Amax(method=method)  # type: ignore[arg-type]
        assert multipliers(calibrated(layer, nan, x, amax=amax)) == multipliers(calibrated(layer, x, amax=amax))
        assert "static amax 0:" in str(report_of(calibrated(layer, torch.zeros_like(x), amax=amax)))
        assert "dynamic: no calibration" in str(report_of(calibrated(layer, nan, amax=amax)))


def test_overrides_of_no_layer_are_named() -> None:
    _, x, layer = one_layer()
    assert "unused in the recipe: calibration of 'dwon'" in str(
        report_of(calibrated(layer, x, overrides={"dwon": None}))
    )


# errors: one sentence, and which layer or input


class NoMatmul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def refused(error: type[FxQuantError], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_bad_input_is_refused_in_one_sentence() -> None:
    model, x = block()
    program = block_program()
    refused(ProgramError, "an ExportedProgram is expected, not a Block", lambda: quantize_program(model, "mxfp8"))
    refused(RecipeError, "did you mean 'mxfp8'?", lambda: quantize_program(program, "mxpf8"))
    refused(
        ProgramError, "no matmul to quantize", lambda: quantize_program(exported(NoMatmul(), torch.ones(4, 4)), "mxfp8")
    )
    small = exported(nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8))
    refused(ProgramError, "2 TOO_SMALL", lambda: quantize_program(small, "mxfp8"))
    refused(RecipeError, "scales from training steps", lambda: quantize_program(program, "delayed_scaling"))
    refused(RecipeError, "seed and step", lambda: quantize_program(program, "nvfp4", fold_weights=False))
    refused(
        RecipeError, "layer 'q': fprop cannot multiply",
        lambda: quantize_program(program, per_role(input=Float8BlockQuantizer(), weight=Float8BlockQuantizer())),
    )  # fmt: skip
    refused(
        OptionError, "needs fold_weights=True",
        lambda: quantize_program(program, "mxfp8", fold_weights=False, calibration=[x]),
    )  # fmt: skip
    refused(ProgramError, "no inputs", lambda: quantize_program(program, "current_scaling", calibration=[]))
    refused(
        ProgramError, "calibration input 2 does not fit the program",
        lambda: calibrated(program, x, torch.randn(4, 8, 65)),
    )  # fmt: skip
    infinite = torch.full((4, 64), torch.inf)
    refused(ProgramError, "layer '0' is infinite", lambda: calibrated(one_layer()[2], infinite))
    refused(OptionError, "method must be 'max'", lambda: Amax(method="mean"))  # type: ignore[arg-type]
    refused(OptionError, "momentum", lambda: Amax(momentum=1.0))
    refused(OptionError, "percentile", lambda: Amax(percentile=0))
    refused(OptionError, "must be a number, not '99'", lambda: Amax(percentile="99"))  # type: ignore[arg-type]
    refused(
        ProgramError, "program: Trying to flatten user inputs with exported input tree spec: TreeSpec",
        lambda: calibrated(program, (x, x)),
    )  # fmt: skip
    for inputs, kind in (({"x": x}, "a dict"), ("data.pt", "a str"), (3, "an int"), (x, "a Tensor")):
        refused(
            OptionError, f"not {kind}: put a single input into a list",
            lambda inputs=inputs: quantize_program(program, "current_scaling", calibration=inputs),
        )  # fmt: skip
    refused(OptionError, "no regular expression", lambda: Calibration([x], overrides={"(": None}))
    refused(OptionError, "of 'down': an fxquant.Amax is expected", lambda: Calibration([x], overrides={"down": "max"}))  # type: ignore[dict-item]
    refused(OptionError, "amax must be an Amax, not 'max'", lambda: Calibration([x], amax="max"))  # type: ignore[arg-type]
    refused(
        ProgramError,
        "is already: give the program it was made from",
        lambda: quantize_program(quantize_program(program, "mxfp8", fold_weights=False), "mxfp8"),
    )
    refused(ProgramError, "has no report", lambda: report_of(program))
    refused(ProgramError, "expected, not a Block", lambda: report_of(model))
    refused(ProgramError, "expected, not a Block", lambda: lower_program(model))


def test_a_program_with_nothing_quantized_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = export(nn.Linear(64, 64), (torch.randn(32, 64),))
    lowered = lower_program(quantize_program(plain, "nvfp4"))
    torch.export.save(lowered, tmp_path / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower_program(torch.export.load(tmp_path / "model.pt2"))
    monkeypatch.setattr("fxquant.export.program.compile_package", lambda program, path, settings: Path(path).touch())
    for door in (
        lower_program,
        functools.partial(aoti_compile_and_package, package_path=tmp_path / "model.pt2"),
        lambda program: lower_program(quantize_program(program, "high_precision")),
    ):
        with pytest.warns(UnquantizedWarning, match=r"nothing in this program is quantized: .*quantize_program"):
            door(plain)


@pytest.mark.parametrize("recipe", ["current_scaling", NVFP4BlockScaling(disable_stochastic_rounding=True)], ids=str)
def test_empty_batches_when_lowered(recipe: Recipe | str) -> None:
    layer = export(nn.Linear(64, 64), (torch.randn(4, 64),), dynamic_shapes=({0: Dim.AUTO},))
    assert run(lower_program(quantize_program(layer, recipe)), torch.randn(0, 64)).shape == (0, 64)


def test_high_precision_leaves_a_program_alone() -> None:
    model, x = block()
    program = quantized_block("high_precision")
    assert ops(program) == ops(block_program()) and torch.equal(run(program, x), model(x))


def test_static_scales_keep_the_values_of_the_spec() -> None:
    """The multiplier of a static scale is the spec's own function of the amax, powers of two included."""
    _, x, layer = one_layer()
    quantizer = Float8CurrentScalingQuantizer(force_pow_2_scales=True)
    program = calibrated(layer, x, recipe=CustomRecipe(qfactory=lambda role: quantizer))
    value = multipliers(program)["0"]
    assert torch.tensor(value).frexp().mantissa == 0.5
    assert 1 / value == quantizer.quantize(x).rowwise.scale.item()
    assert quantizer.spec(Direction.ROWWISE).pow2
