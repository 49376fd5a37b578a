"""Runs of one function within a CUDA graph beside runs on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_same_in_a_graph(run: Callable[[Tensor], Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """Asserts that all `inputs`, one after another in a CUDA graph, give the bits that each gives alone."""
    with torch.no_grad():
        expected = []
        for x in inputs:
            expected.append([y.clone() for y in run(x)])
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = [run(x) for x in inputs]
        for _ in range(3):
            graph.replay()
            for results, alone in zip(replayed, expected, strict=True):
                assert all(map(torch.equal, results, alone))
