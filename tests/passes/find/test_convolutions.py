"""Convolutions: products where each input is read once, a reason elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Calls, Form, Rewrite, check_form, sizes
from torch import Tensor

import fxquant
from fxquant.compat import torch_version
from fxquant.decisions import SkipReason
from fxquant.passes.find.walk import find_matmuls


def _conv(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3](x, w, b, **options)


CONVOLUTION = SkipReason.CONVOLUTION


FORMS = {
    "conv1d 1x1": Form(_conv, [(3, 24, 7)], [(40, 24, 1), (40,)], "linear", [(21, 24, 40)]),
    "conv2d 1x1": Form(_conv, [(3, 24, 7, 5)], [(40, 24, 1, 1), (40,)], "linear", [(105, 24, 40)]),
    "conv2d unbatched": Form(_conv, [(24, 7, 5)], [(40, 24, 1, 1)], "linear", [(35, 24, 40)]),
    "conv2d same": Form(
        lambda x, w: _conv(x, w, padding="same"), [(3, 24, 7, 5)], [(40, 24, 1, 1)], "linear", [(105, 24, 40)]
    ),
    "conv1d patches": Form(lambda x, w: _conv(x, w, stride=4), [(3, 6, 20)], [(40, 6, 4)], "linear", [(15, 24, 40)]),
    "conv2d patches": Form(
        lambda x, w, b: _conv(x, w, b, stride=(4, 2)), [(3, 6, 20, 6)], [(40, 6, 4, 2), (40,)], "linear", [(45, 48, 40)]
    ),
    "conv3d patches": Form(
        lambda x, w: _conv(x, w, stride=2), [(3, 6, 4, 6, 2)], [(40, 6, 2, 2, 2)], "linear", [(18, 48, 40)]
    ),
    "conv 3 taps": Form(_conv, [(3, 6, 20)], [(40, 6, 3)], "linear", [(54, 18, 40)], CONVOLUTION),
    "conv1d rest": Form(lambda x, w: _conv(x, w, stride=4), [(3, 6, 22)], [(40, 6, 4)], "linear", [(15, 24, 40)]),
    "conv2d rest": Form(
        lambda x, w, b: _conv(x, w, b, stride=(4, 2)), [(3, 6, 23, 6)], [(40, 6, 4, 2), (40,)], "linear", [(45, 48, 40)]
    ),
    "conv3d rest": Form(
        lambda x, w: _conv(x, w, stride=2), [(6, 5, 7, 3)], [(40, 6, 2, 2, 2)], "linear", [(6, 48, 40)]
    ),
    "conv groups": Form(
        lambda x, w: _conv(x, w, groups=2), [(3, 12, 7)], [(40, 6, 1)], "linear", [(21, 6, 40)], CONVOLUTION
    ),
    "conv padded": Form(
        lambda x, w: _conv(x, w, padding=1), [(3, 6, 5, 5)], [(40, 6, 1, 1)], "linear", [(147, 6, 40)], CONVOLUTION
    ),
    "conv transposed": Form(
        F.conv_transpose1d, [(3, 6, 5)], [(6, 40, 4)], "linear", [(15, 6, 160)], CONVOLUTION
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dynamic: bool) -> None:
    check_form(name, FORMS[name], dynamic)


@pytest.mark.parametrize("name", ["conv2d patches", "conv transposed"])
def test_decomposed_convolution_is_found_the_same(name: str) -> None:
    form = FORMS[name]
    model, inputs = Calls(form.function, *form.weights), tuple(torch.randn(shape) for shape in form.inputs)
    gm = torch.export.export(model, inputs).run_decompositions().graph_module
    (match,) = find_matmuls(gm)
    assert match.form == "convolution"
    assert [sizes(product) for product in match.products] == form.sizes
    assert match.skip == (form.skip and (form.skip, "a transposed convolution"))


@pytest.mark.parametrize("size", [37, 40])
def test_one_graph_takes_images_with_a_rest_and_without(size: int) -> None:
    conv, backend = torch.nn.Conv2d(3, 16, 8, 8), Rewrite()
    compiled = torch.compile(conv, backend=backend, dynamic=True, fullgraph=True)
    for height in (size, 48, 29):
        x = torch.randn(2, 3, height, height + 11)
        torch.testing.assert_close(compiled(x), conv(x))
    assert [match.skip for match in backend.found] == [None]


@pytest.mark.parametrize("rows", [37, 40])
def test_a_program_takes_images_with_a_rest_and_without(rows: int) -> None:
    conv, sizes = torch.nn.Conv1d(3, 32, 8, 8), {2: torch.export.Dim("length", min=16)}
    source = torch.export.export(conv, (torch.randn(2, 3, rows),), dynamic_shapes=(sizes,))
    quantized = fxquant.quantize_program(source, "mxfp8")
    for program in (quantized, fxquant.lower_program(quantized), source):
        for length in (rows, 48, 29, 16):
            x = torch.randn(2, 3, length)
            assert (program.module()(x) - conv(x)).norm() < 0.1 * conv(x).norm()


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch 2.11 cannot capture such a convolution")
def test_patches_whose_number_depends_on_data_say_so() -> None:
    conv = torch.nn.Conv1d(3, 16, 4, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = Rewrite()
        compiled = torch.compile(lambda x: conv(x[:, x.sum(0) > 0]), backend=backend, fullgraph=True)
        compiled(torch.ones(3, 20))
    assert [match.skip and match.skip[0] for match in backend.found] == [CONVOLUTION]
    assert "depends on data" in str(backend.found[0].skip)
