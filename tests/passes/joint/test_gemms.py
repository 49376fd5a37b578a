"""The GEMMs that the products of a joint graph are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut

from fxquant.backend.backend import Backend, compile_eager
from fxquant.passes.graph.meta import places_of
from fxquant.passes.joint.gemms import gemms_of
from fxquant.passes.pipeline import Partition


@pytest.mark.parametrize("recipe", ["mxfp8", "weight_only_fp8"])
def test_three_gemms_of_each_linear_are_told_apart_and_know_their_places(recipe: str) -> None:
    seen = Counter[Any]()

    class Looking(Backend):
        def compile(self, gm: Any, example_inputs: Any) -> Any:
            def cut(joint: Any, *args: Any, **kwargs: Any) -> Any:
                seen.update((places_of(node), gemm) for node, gemm in gemms_of(joint.graph).items())
                return min_cut(joint, *args, **kwargs)

            return compile_eager(gm, example_inputs, lambda module, _: module, Partition(self.settings, cut))

    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    torch.compile(model, backend=Looking(recipe))(torch.randn(32, 64)).sum().backward()
    second = [((1,), gemm) for gemm in ("fprop", "dgrad", "wgrad")]
    assert seen == Counter([((0,), "fprop"), ((0,), "wgrad"), *second])
