"""Every name and spelling of a product: found with its sizes, and rewritten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewriting import Calls, Form, Rewrite, Shape, check, check_form, randn
from torch import Tensor

from fxquant.decisions import SkipReason


def _addmm_(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x = x * 2
    view = x[:]
    x.addmm_(y, w, beta=0.5, alpha=3)
    return x + view


SMALL, UNSUPPORTED = SkipReason.TOO_SMALL, SkipReason.UNSUPPORTED_FORM


FORMS = {
    # F.linear
    "linear 1d": Form(F.linear, [(24,)], [(40, 24)], "linear", [(1, 24, 40)]),
    "linear 2d bias": Form(F.linear, [(5, 24)], [(40, 24), (40,)], "linear", [(5, 24, 40)]),
    "linear 4d": Form(F.linear, [(2, 3, 5, 24)], [(40, 24), (40,)], "linear", [(30, 24, 40)]),
    "linear transposed": Form(lambda x, w: F.linear(x, w.t()), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]),
    "linear computed": Form(lambda x, v: F.linear(x, v.tanh()), [(5, 24), (40, 24)], [], "linear", [(5, 24, 40)]),
    "linear slice": Form(lambda x, w: F.linear(x, w[8:]), [(5, 24)], [(40, 24)], "linear", [(5, 24, 32)]),
    "linear chunk": Form(lambda x, w: F.linear(x, w.chunk(2)[1]), [(5, 24)], [(40, 24)], "linear", [(5, 24, 20)]),
    "linear 1d weight": Form(F.linear, [(5, 24)], [(24,)], "linear", [(5, 24, 1)], SMALL),
    # products with a matrix
    "mm": Form(torch.mm, [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]),
    "method mm": Form(lambda x, w: x.mm(w.t()), [(5, 24)], [(40, 24)], "linear", [(5, 24, 40)]),
    "matmul": Form(torch.matmul, [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]),
    "matmul mT": Form(lambda x, w: x.matmul(w.mT), [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]),
    "at": Form(lambda x, w: x @ w.T, [(2, 3, 5, 24)], [(40, 24)], "linear", [(30, 24, 40)]),
    "at transposed input": Form(lambda x, w: x.mT @ w, [(3, 24, 5)], [(24, 40)], "linear", [(15, 24, 40)]),
    "at, of the second operand": Form(
        lambda x, w: w.__rmatmul__(x), [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]
    ),
    "at vector": Form(lambda x, w: x @ w, [(24,)], [(24, 40)], "linear", [(1, 24, 40)]),
    "linalg": Form(torch.linalg.matmul, [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]),
    "weight left": Form(lambda x, w: w @ x, [(24, 5)], [(40, 24)], "linear", [(5, 24, 40)]),
    "weight left 3d": Form(lambda x, w: w @ x, [(3, 24, 5)], [(40, 24)], "linear", [(15, 24, 40)]),
    "weight left vector": Form(lambda x, w: w @ x, [(24,)], [(40, 24)], "linear", [(1, 24, 40)]),
    "weight left mv": Form(lambda x, w: torch.mv(w, x), [(24,)], [(40, 24)], "linear", [(1, 24, 40)]),
    "two weights": Form(lambda x, v, w: x + v @ w, [(5, 40)], [(5, 24), (24, 40)], "linear", [(5, 24, 40)]),
    "inner": Form(torch.inner, [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]),
    "one of a stack": Form(lambda x, w: x @ w[1], [(5, 24)], [(3, 24, 40)], "grouped_linear", [(5, 24, 40)]),
    "cast weight": Form(
        lambda x, w: x.to(torch.bfloat16) @ w.to(torch.bfloat16), [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]
    ),
    # batches that share one matrix
    "bmm expand": Form(
        lambda x, w: torch.bmm(x, w.expand(3, -1, -1)), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]
    ),
    "bmm unsqueeze expand": Form(
        lambda x, w: x.bmm(w.t().unsqueeze(0).expand(3, 24, 40)), [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]
    ),
    "bmm of one": Form(torch.bmm, [(1, 5, 24)], [(1, 24, 40)], "linear", [(5, 24, 40)]),
    "matmul of one": Form(torch.matmul, [(3, 5, 24)], [(1, 24, 40)], "linear", [(15, 24, 40)]),
    "matmul one to many": Form(torch.matmul, [(1, 5, 24)], [(3, 24, 40)], "linear", [(5, 24, 120)]),
    # products with an addend
    "addmm": Form(lambda x, b, w: torch.addmm(b, x, w), [(5, 24)], [(40,), (24, 40)], "linear", [(5, 24, 40)]),
    "addmm factors": Form(
        lambda x, b, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), [(5, 24)], [(40,), (24, 40)], "linear", [(5, 24, 40)]
    ),
    "addmm matrix": Form(
        lambda x, b, w: b.addmm(x, w), [(5, 24)], [(5, 40), (24, 40)], "linear", [(5, 24, 40)]
    ),
    "addmm broadcast": Form(
        lambda x, b, w: torch.addmm(b, x, w, beta=2), [(5, 24)], [(5, 1), (24, 40)], "linear", [(5, 24, 40)]
    ),
    "addmm without": Form(
        lambda x, w: torch.addmm(w.new_full((40,), torch.nan), x, w, beta=0), [(5, 24)], [(24, 40)], "linear",
        [(5, 24, 40)],
    ),
    "addmm weight left": Form(
        lambda x, b, w: torch.addmm(b, w, x), [(24, 5)], [(5,), (40, 24)], "linear", [(5, 24, 40)]
    ),
    "addmm_": Form(_addmm_, [(5, 40), (5, 24)], [(24, 40)], "linear", [(5, 24, 40)]),
    "addbmm": Form(torch.addbmm, [(5, 40), (3, 5, 24)], [(3, 24, 40)], "linear", [(5, 72, 40)]),
    # einsum
    "einsum": Form(
        lambda x, w: torch.einsum("bsi,io->bso", x, w), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]
    ),
    "einsum implicit": Form(
        lambda x, w: torch.einsum("...i,oi", x, w), [(2, 3, 5, 24)], [(40, 24)], "linear", [(30, 24, 40)]
    ),
    "einsum weight first": Form(
        lambda x, w: torch.einsum("oi, bsi -> osb", w, x), [(3, 5, 24)], [(40, 24)], "linear", [(15, 24, 40)]
    ),
    "einsum heads out": Form(
        lambda x, w: torch.einsum("bsi,hid->bhsd", x, w), [(3, 5, 24)], [(4, 24, 16)], "linear", [(15, 24, 64)]
    ),
    "einsum heads in": Form(
        lambda x, w: torch.einsum("bshd,dho->bso", x, w), [(3, 5, 4, 16)], [(16, 4, 40)], "linear", [(15, 64, 40)]
    ),
    "einsum lists": Form(
        lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [2, 0]), [(5, 24)], [(40, 24)], "linear", [(5, 24, 40)]
    ),
    "einsum upper case": Form(
        lambda x, w: torch.einsum("aB,BC", x, w), [(5, 24)], [(24, 40)], "linear", [(5, 24, 40)]
    ),
    "einsum chain": Form(
        lambda x, v, w: torch.einsum("bsi,ij,jo->bso", x, v, w), [(3, 5, 24)], [(24, 16), (16, 40)], "linear",
        [(15, 24, 16), (15, 16, 40)],
    ),
    "einsum chain weights first": Form(
        lambda x, v, w: torch.einsum("ij,jo,bsi->bos", v, w, x), [(3, 5, 24)], [(24, 16), (16, 40)], "linear",
        [(15, 24, 16), (15, 16, 40)],
    ),
    "chain_matmul": Form(
        torch.chain_matmul, [(5, 24)], [(24, 16), (16, 40), (40, 32)], "linear",
        [(5, 24, 16), (5, 16, 40), (5, 40, 32)],
    ),
    "multi_dot": Form(
        lambda x, v, w: torch.linalg.multi_dot([v, x, w]), [(24, 5)], [(16, 24), (5, 40)], "linear",
        [(5, 24, 16), (16, 5, 40)],
    ),
    "multi_dot vector": Form(
        lambda x, v, w: torch.linalg.multi_dot((x, v, w)), [(24,)], [(24, 16), (16, 40)], "linear",
        [(1, 24, 16), (1, 16, 40)],
    ),
    # tensordot
    "tensordot count": Form(
        lambda x, w: torch.tensordot(x, w, dims=1), [(3, 5, 24)], [(24, 40)], "linear", [(15, 24, 40)]
    ),
    "tensordot default": Form(
        lambda x, w: torch.tensordot(x, w), [(3, 4, 24)], [(4, 24, 40)], "linear", [(3, 96, 40)]
    ),
    "tensordot lists": Form(
        lambda x, w: torch.tensordot(x, w, dims=([-1, 1], [2, 1])), [(3, 4, 24)], [(40, 4, 24)], "linear", [(3, 96, 40)]
    ),
    "tensordot many out": Form(
        lambda x, w: torch.tensordot(x, w, dims=([2], [1])), [(3, 5, 24)], [(4, 24, 8)], "linear", [(15, 24, 32)]
    ),
    # products of two activations
    "activations mm": Form(torch.mm, [(5, 24), (24, 40)], [], "matmul", [(5, 24, 40)]),
    "activations bmm": Form(torch.bmm, [(3, 5, 24), (3, 24, 40)], [], "matmul", [((3,), 5, 24, 40)]),
    "activations matmul": Form(
        torch.matmul, [(2, 3, 5, 24), (2, 3, 24, 40)], [], "matmul", [((2, 3), 5, 24, 40)]
    ),
    "activations mT": Form(lambda x, y: x @ y.mT, [(2, 3, 5, 24), (2, 3, 7, 24)], [], "matmul", [((2, 3), 5, 24, 7)]),
    "activations missing axis": Form(torch.matmul, [(2, 3, 5, 24), (3, 24, 40)], [], "matmul", [((3,), 10, 24, 40)]),
    "activations broadcast": Form(
        torch.matmul, [(2, 1, 5, 24), (1, 3, 24, 40)], [], "matmul", [(10, 24, 120)]
    ),
    "activations right one": Form(
        torch.matmul, [(2, 3, 5, 24), (2, 1, 24, 40)], [], "matmul", [((2,), 15, 24, 40)]
    ),
    "activations baddbmm": Form(
        lambda b, x, y: torch.baddbmm(b, x, y, beta=2, alpha=0.5), [(5, 1), (3, 5, 24), (3, 24, 40)], [], "matmul",
        [((3,), 5, 24, 40)],
    ),
    "activations addbmm": Form(torch.addbmm, [(5, 40), (3, 5, 24), (3, 24, 40)], [], "matmul", [(5, 72, 40)]),
    "activations einsum": Form(
        lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), [(2, 5, 4, 24), (2, 7, 4, 24)], [], "matmul",
        [((2, 4), 5, 24, 7)],
    ),
    "activations einsum mixed": Form(
        lambda x, y: torch.einsum("bqhd,bkgd->qkbhg", x, y), [(2, 5, 4, 24), (2, 7, 3, 24)], [], "matmul",
        [((2,), 20, 24, 21)],
    ),
    # found, with a reason
    "bilinear": Form(F.bilinear, [(5, 24), (5, 16)], [(40, 24, 16)], "linear", [(5, 384, 40)], SkipReason.BILINEAR),
    "mv": Form(torch.mv, [(5, 24)], [(24,)], "linear", [(5, 24, 1)], SMALL),
    "at weight vector": Form(lambda x, w: x @ w, [(3, 5, 24)], [(24,)], "linear", [(15, 24, 1)], SMALL),
    "addmv": Form(torch.addmv, [(5,), (5, 24), (24,)], [], "matmul", [(5, 24, 1)], SMALL),
    "dot": Form(torch.dot, [(24,), (24,)], [], "matmul", [(1, 24, 1)], SMALL),
    "vecdot": Form(torch.linalg.vecdot, [(3, 24), (5, 3, 24)], [], "matmul", [((3,), 1, 24, 5)], SMALL),
    "vecdot of another axis": Form(
        lambda x, y: torch.linalg.vecdot(x, y, dim=0), [(24, 5), (24, 1)], [], "matmul", [(5, 24, 1)], SMALL
    ),
    "row dots": Form(lambda x, y: torch.einsum("bd,bd->b", x, y), [(5, 24), (5, 24)], [], "matmul",
                     [((5,), 1, 24, 1)], SMALL),
    "summed axis": Form(
        lambda x, w: torch.einsum("bsi,io->bo", x, w), [(3, 5, 24)], [(24, 40)], "linear", [None], UNSUPPORTED
    ),
    "three activations": Form(
        lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z), [(5, 24), (24, 16), (16, 40)], [], "matmul", [None],
        SkipReason.MULTI_PRODUCT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dynamic: bool) -> None:
    check_form(name, FORMS[name], dynamic)


@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (2, 0, 24), (2, 1, 24)])
def test_empty_and_single_rows(shape: Shape) -> None:
    model = Calls(lambda x, w, v: F.linear(x, w) @ v + torch.einsum("...i,oi->...o", x, w) @ v, (40, 24), (40, 16))
    assert check(model, [randn(*shape)], Rewrite()).reasons() == [None] * 4


def test_needs_grad_of_a_chain() -> None:
    model = Calls(lambda x, v, w: torch.chain_matmul(x, v, w), (24, 16), (16, 40))
    model.weights[1].requires_grad_(False)
    (match,) = check(model, [torch.randn(5, 24)], Rewrite()).found
    assert match.needs_grad == ((False, True), (True, False))
