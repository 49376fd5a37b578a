"""The Triton GEMMs of groups in the interpreter, called as CUDA calls them: layouts, masks, scales, any split.

What tensor cores make of them is for the tests on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from interpreting import interpret, run_interpreted

from fxquant.compat.patches import written_by
from fxquant.compat.private import make_fx, triton_kernel_wrapper_mutation
from fxquant.formats import QuantSpec
from fxquant.kernels.cast.choice import supports_groups
from fxquant.kernels.grouped import choice
from fxquant.kernels.grouped import triton_cast as triton_grouped_cast
from fxquant.kernels.grouped import triton_gemm as triton_grouped
from fxquant.kernels.grouped.ops import grouped_scaled_mm

CASES = (
    ("block_1x128_e4m3(pow2)", "block_128x128_e4m3(pow2)", "block_1x128_e4m3(pow2)"),
    ("block_1x128_e4m3", "block_1x128_e4m3", "block_1x128_e5m2"),
    ("per_tensor_e4m3", "per_tensor_e4m3", "per_tensor_e5m2"),
    ("per_row_e4m3", "per_tensor_e4m3", "per_row_e5m2"),
)
"""Formats of input, weight and gradient."""
SPLITS = ([3, 3, 140, 200], [0, 0, 0, 0], [128, 256, 256, 257])


def test_gemms_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_launches_of_groups_in_both_directions() -> None:
    """One looks up where they are, and one quantizes. Of scales by row there are two: the first knows rows by itself,

    and takes the amaxes of columns along, for itself or for the backward.
    """

    def launches(text: str) -> list[list[str]]:
        spec = QuantSpec.parse(text)
        assert supports_groups(spec, ragged=True)
        run = make_fx(lambda x, offs: triton_grouped_cast.quantize(x, offs, spec, spec), tracing_mode="fake")
        nodes = [n for n in run(x, offs).graph.nodes if n.target is triton_kernel_wrapper_mutation]
        return [written_by(n.kwargs) for n in nodes]

    x, offs = torch.randn(70, 48).bfloat16(), torch.tensor([3, 3, 40, 60], dtype=torch.int32)
    rows, columns = ["row_data", "row_scale"], ["column_data", "column_scale"]
    assert launches("per_row_e4m3") == [["strips"], [*rows, "column_amax"], columns]
    assert launches("per_tensor_e4m3") == launches("mxfp8_e4m3") == [["strips"], [*rows, *columns]]
    tiles = QuantSpec.parse("block_128x128_e4m3")
    assert not supports_groups(tiles, ragged=True) and supports_groups(tiles, ragged=False)


def main() -> None:
    interpret(triton_grouped)
    choice.capability = lambda device: (9, 0)
    configs = "_FAST", "_SLOW", "_BLOCKS", "_SHORT_COLUMNS"
    few = {name: replace(getattr(triton_grouped, name), programs=3) for name in configs}
    vars(triton_grouped).update(few)
    ops, n, k = torch.ops.fxquant, 150, 200
    torch.manual_seed(0)
    for split in SPLITS:
        offs = torch.tensor(split, dtype=torch.int32)
        rows = split[-1] + 10
        x, w, dy = torch.randn(rows, k), torch.randn(4, n, k), torch.randn(rows, n)
        x[split[-1] :] = dy[split[-1] :] = float("nan")
        for input, weight, grad in CASES:
            pairs = (
                ((x, offs, input, "rowwise"), (w, None, weight, "rowwise")),
                ((dy, offs, grad, "rowwise"), (w, None, weight, "columnwise")),
                ((dy, offs, grad, "columnwise"), (x, offs, input, "columnwise")),
            )
            for left, right in pairs:
                a, b = ops.split_quantize(*left), ops.split_quantize(*right)
                for fast in (False, True):
                    arguments = a, b, offs, left[2], right[2], torch.float32, fast
                    got, expected = grouped_scaled_mm.best(*arguments), ops.grouped_scaled_mm(*arguments)
                    error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
                    assert got.shape == expected.shape and error < 1e-5, (split, left[2:], right[2:], error)
                    assert got.ndim == 3 or not got[split[-1] :].any(), "rows of no group"


if __name__ == "__main__":
    main()
