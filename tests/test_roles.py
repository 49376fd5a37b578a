from __future__ import annotations

import torch
from helpers import Asked, compiled, eager_backend
from torch import nn

from fxquant import CustomRecipe, QuantizerRole, recipes
from fxquant.roles import GEMM_OPERANDS, Direction, Gemm


def test_every_direction_of_every_operand_serves_one_gemm() -> None:
    used = [operand for pair in GEMM_OPERANDS.values() for operand in pair]
    assert len(used) == len(set(used)) == 6
    assert {name for name, _ in used} == {"input", "weight", "grad_output"}
    assert GEMM_OPERANDS[Gemm.FPROP] == (("input", Direction.ROWWISE), ("weight", Direction.ROWWISE))


def test_a_role_is_a_value_that_prints_its_layer() -> None:
    role = QuantizerRole("linear", "weight", "layers.0.fc")
    assert role == QuantizerRole(module_type="linear", tensor_type="weight", name="layers.0.fc")
    assert len({role, QuantizerRole("linear", "weight", "layers.0.fc"), QuantizerRole()}) == 2
    assert str(role) == "layers.0.fc (linear, weight)"
    assert str(QuantizerRole("matmul", "input")) == "<model> (matmul, input)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.heads = nn.ModuleDict({"main": nn.Linear(32, 48)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.heads["main"](x)


def asked(model: nn.Module, x: torch.Tensor) -> list[QuantizerRole]:
    factory = Asked(recipes.get("mxfp8"))
    compiled(model, CustomRecipe(qfactory=factory))(x)
    return factory.roles


def test_factory_is_asked_once_for_input_weight_and_grad_output() -> None:
    """Invariant 4; the boundary roles (output, grad_input) are TransformerEngine's default of none."""
    roles = asked(nn.Linear(32, 48), torch.randn(32, 32))
    assert [(r.module_type, r.tensor_type) for r in roles] == [
        ("linear", "input"),
        ("linear", "weight"),
        ("linear", "grad_output"),
    ]


def test_module_paths_reach_the_role() -> None:
    """Invariant 6."""
    names = [r.name for r in asked(Block(), torch.randn(32, 32)) if r.tensor_type == "weight"]
    assert names == ["layers.0", "layers.1", "heads.main"]


def test_a_function_that_calls_a_model_has_the_models_names() -> None:
    model, x = Block(), torch.randn(32, 32)
    factory = Asked(recipes.get("mxfp8"))
    torch.compile(lambda x: model(x).sum(), backend=eager_backend(CustomRecipe(qfactory=factory), model=model))(x)
    assert [r.name for r in factory.roles if r.tensor_type == "weight"] == ["layers.0", "layers.1", "heads.main"]


def test_nothing_is_asked_for_a_gradient_that_no_one_takes() -> None:
    roles = asked(Block().requires_grad_(False), torch.randn(32, 32))
    assert {r.tensor_type for r in roles} == {"input", "weight"}


def test_products_of_activations_have_a_module_type_of_their_own() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, x.mT.tanh())

    factory = Asked(recipes.get("mxfp8"))
    backend = eager_backend(CustomRecipe(qfactory=factory))
    torch.compile(run, backend=backend)(torch.randn(2, 32, 32))
    assert {(r.module_type, r.tensor_type) for r in factory.roles} == {("matmul", "input")}
    assert {str(d.skip_reason) for d in backend.report().decisions} == {"HIGH_PRECISION"}


def test_a_factory_dispatches_by_name_and_tensor_type() -> None:
    mx, plain = recipes.get("mxfp8"), recipes.get("high_precision")

    def factory(role: QuantizerRole):
        return (mx if role.name.startswith("layers.") else plain).quantizer(role)

    backend = eager_backend(CustomRecipe(qfactory=factory))
    torch.compile(Block(), backend=backend)(torch.randn(32, 32))
    quantized = {d.layer: d.quantizer is not None for d in backend.report().decisions}
    assert quantized == {"layers.0": True, "layers.1": True, "heads.main": False}
