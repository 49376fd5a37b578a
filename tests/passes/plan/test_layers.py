from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import captured
from torch import nn

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


def test_names_that_are_set_stay() -> None:
    (gm,) = captured(Nested(), torch.randn(16, 16))
    matches = [replace(match, name="mine") for match in find_matmuls(gm)]
    for _ in range(2):
        matches = name_layers(matches, {})
    assert matches[0].name == "mine"
