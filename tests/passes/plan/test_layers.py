from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import captured
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fxquant.passes.find.walk import find_matmuls
from fxquant.passes.plan.layers import clean_path, layer_name, name_layers


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0.mlp.gate", "layers.0.mlp.gate"),
        ("L['self'].layers[0].mlp", "layers.0.mlp"),
        ("L['self'].layers._modules['0'].mlp", "layers.0.mlp"),
        ("L['self'].heads['main']", "heads.main"),
        ("getattr(L['self'].layers, '0').mlp", "layers.0.mlp"),
        ("getattr(getattr(L['self'].a, \"1\").b, '2')", "a.1.b.2"),
        ("L['args'][0].proj", "proj"),
        ("L['fn'].proj", "proj"),
        ("G['model'].proj", "proj"),
        ("L['self']._orig_mod.proj", "proj"),
        ("L['self'].block._checkpoint_wrapped_module.fc", "block.fc"),
        ("L['self'].my_orig_mod.fc", "my_orig_mod.fc"),
        ("L['self'].__dict__['_modules']['base'].__dict__['_modules']['model'].layers.0.fc", "base.model.layers.0.fc"),
        ("L['fn'].__closure__[0].cell_contents.layers._modules['0'].fc", "layers.0.fc"),
        ("L['loss'].__closure__[0].cell_contents", ""),
        ("L['fn'].__self__.layers.0.fc", "layers.0.fc"),
        ("L['fn'].func.__self__.fc", "fc"),
        ("L['self']._modules['0']", "0"),
        ("L['self'].my_modules['a']", "my_modules.a"),
    ],
)
def test_paths_lose_dynamos_spelling(path: str, clean: str) -> None:
    assert clean_path(path) == clean


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) @ x


def test_a_match_is_named_after_its_innermost_module() -> None:
    (gm,) = captured(Nested(), torch.randn(16, 16))
    matches = name_layers(find_matmuls(gm), {})
    assert [match.name for match in matches] == ["blocks.0.0", ""]


def test_the_users_names_win() -> None:
    model = Nested()
    (gm,) = captured(model, torch.randn(16, 16))
    matches = name_layers(find_matmuls(gm), {str(id(model.blocks[0][0])): "whole.model.blocks.0.0"})
    assert [match.name for match in matches] == ["whole.model.blocks.0.0", ""]
    assert layer_name(matches[0].node, {}) == "blocks.0.0"


class ByForward(nn.Module):
    """Layers of which torch sees no call, and weights that belong to no other module or to none alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.heads = nn.Linear(16, 16), nn.ModuleDict({"b": nn.Linear(16, 16)})
        self.embed, self.weight = nn.Embedding(16, 16), nn.Parameter(torch.randn(16, 16))
        self.c = parametrizations.orthogonal(nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.heads["b"].forward(self.a.forward(x)) @ self.embed.weight.mT @ self.weight
        x = self.c(x) @ torch.cat([self.a.weight[:8], self.embed.weight[:8]])
        return checkpoint(self.a.forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_products_of_a_layers_weight_have_its_name_where_another_module_was_called() -> None:
    model = ByForward()
    (gm,) = captured(model, torch.randn(16, 16))
    matches, inside = find_matmuls(gm), {str(id(part)): f"m.{path}" for path, part in model.named_modules() if path}
    names = [match.name for match in name_layers(matches, {})]
    assert [name for name in names if "parametrizations" not in name] == ["a", "heads.b", "embed", "", "c", "", "a"]
    assert [match.name for match in name_layers(matches, {"": "m", **inside})] == [f"m.{n}".strip(".") for n in names]


def test_names_that_are_set_stay() -> None:
    (gm,) = captured(Nested(), torch.randn(16, 16))
    matches = [replace(match, name="mine") for match in find_matmuls(gm)]
    for _ in range(2):
        matches = name_layers(matches, {})
    assert matches[0].name == "mine"
