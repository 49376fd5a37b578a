"""The kernels for a weight that alone is quantized, without a GPU: values, instructions, and who gets them."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import calls_left, size_up_to
from interpreting import run_interpreted
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import gelu

import fxquant
from fxquant import CustomRecipe, MXFP8Quantizer, Rule, Rules
from fxquant.compat.private import inductor_decompositions, make_fx, triton_kernel_wrapper_functional
from fxquant.formats import IDENTITY, QuantSpec
from fxquant.kernels.cast.reference import decode_e2m1
from fxquant.kernels.linear import choice, triton_weight_only
from fxquant.kernels.linear.choice import GemmFacts, GemmKernel
from fxquant.kernels.linear.ops import scaled_mm
from fxquant.kernels.linear.weight_only import Tiles, Wide

W8, W4 = "per_row_e4m3(torchao)", "nvfp4"


def test_values_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_weight_only.py"))


_BITS = {"and.b32": operator.and_, "or.b32": operator.or_, "shl.b32": operator.lshift, "mul.lo.u32": operator.mul}


def run_instructions(text: str, words: Tensor, scale: Tensor) -> list[Tensor]:
    """What instructions of PTX write into the registers $0 to $3, from bytes in $4 and pairs of scales in $5 and $6."""
    registers: dict[str, Tensor] = {"$4": words, "$5": scale, "$6": scale}
    mask = 2**32 - 1

    def value(name: str) -> Any:
        return registers[name] if name in registers else int(name, 0)

    for instruction in re.sub(r"[{}]", "", text).split(";"):
        if not instruction.strip() or instruction.strip().startswith(".reg"):
            continue
        opcode, rest = instruction.split(maxsplit=1)
        target, *names = (name.strip() for name in rest.split(","))
        a, b, *more = map(value, names)
        if opcode == "prmt.b32":
            both = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)]
            out = sum(both[more[0] >> 4 * i & 7] << 8 * i for i in range(4))
        elif opcode.startswith("mul.rn"):
            dtype = torch.bfloat16 if "bf16" in opcode else torch.float16
            halves = [[(x >> shift & 0xFFFF).to(torch.uint16).view(dtype) for x in (a, b)] for shift in (0, 16)]
            low, high = ((x * y).view(torch.int16).long() & 0xFFFF for x, y in halves)
            out = low | high << 16
        else:
            out = _BITS[opcode](a, b)
        registers[target] = out & mask
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_instructions_decode_every_pair_of_elements_times_every_scale(dtype: torch.dtype) -> None:
    """Exactly, at every place of a word, NaN and subnormal scales and elements among them."""
    bf16 = dtype == torch.bfloat16
    texts = re.findall(r'"""(\{ \.reg \.b32 p.*?)"""', triton_weight_only.nvfp4_values.src, re.DOTALL)
    codes = torch.arange(256)
    scales = codes[:128].to(torch.uint8).view(torch.float8_e4m3fn).float()
    stored = (scales * 2.0**119).to(dtype) if bf16 else scales.to(dtype)
    bits = stored.view(torch.int16).long() & 0xFFFF
    words = codes | (codes + 77) % 256 << 8 | (codes * 3) % 256 << 16 | (255 - codes) << 24
    a, b, c, d = run_instructions(texts[not bf16], words[:, None], (bits | bits << 16)[None, :])
    for place in range(4):
        byte = words >> 8 * place & 255
        for pairs, nibble in (((a, b), byte & 15), ((c, d), byte >> 4)):
            got = (pairs[place // 2] >> 16 * (place % 2) & 0xFFFF).to(torch.uint16).view(dtype).double()
            exact = decode_e2m1(nibble)[:, None].double() * scales[None, :].double()
            torch.testing.assert_close(got * (2.0**7 if bf16 else 2.0**14), exact, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, and a Triton without the Gluon of another kernel."""
    monkeypatch.setattr(choice, "capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "knows_gluon", lambda: False)


_SHOWN = ("mm", "add", "sum", "weight_only_mm")


def lowered(
    rows: int, spec: str, *, after: Any = None, length: int = 256, width: int = 16384, most: int | None = None,
    dtype: torch.dtype = torch.bfloat16, stored: bool = True, **options: bool,
) -> list[str]:  # fmt: skip
    """What is left to run of x times a weight, quantized there or `stored` so, and of what becomes `after` of it."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = rows if most is None else size_up_to(mode, rows, most)
    with mode:
        x = torch.empty(size, length, device="cuda", dtype=dtype)
        whole = torch.empty(width, length, device="cuda", dtype=dtype)

        def run(x: Tensor, *weight: Tensor) -> list[Tensor]:
            parts = list(weight) if stored else torch.ops.fxquant.quantize(weight[0], spec, "rowwise")
            y = torch.ops.fxquant.scaled_mm([x], parts, "identity", spec, None, dtype, True)
            return [y] if after is None else after(y)

        parts = torch.ops.fxquant.quantize(whole, spec, "rowwise") if stored else [whole]
        graph = make_fx(run, decomposition_table=dict(inductor_decompositions()))(x, *parts).graph
    names = []
    for node in calls_left(graph, **options):
        if node.target is triton_kernel_wrapper_functional:
            names.append(",".join(node.kwargs["tensors_to_clone"]))
        elif (name := re.sub(r"^(aten|fxquant_kernels)\.|\..*$", "", str(node.target))) in _SHOWN:
            names.append(name)
    return names


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("spec", [W8, W4])
def test_few_rows_read_the_stored_weight(spec: str) -> None:
    for rows in (1, 2, 16, 32):
        assert lowered(rows, spec) == ["y"], rows
        assert lowered(rows, spec, dtype=torch.float16) == ["y"], rows
    for rows in (33, 128):
        assert lowered(rows, spec) == lowered(rows, spec, dtype=torch.float16) == ["y"], rows
    assert lowered(129, spec)[-1] == "mm" and lowered(16, spec, dtype=torch.float32)[-1] == "mm"
    assert lowered(16, spec, length=8192, width=512) == ["y", "sum"]
    assert lowered(16, spec, most=32) == ["y"] and lowered(16, spec, most=129)[-1] == "mm"
    assert lowered(64, spec, length=8192, width=512) == ["y", "sum"] and lowered(16, spec, most=33) == ["y"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("spec", [W8, W4])
def test_what_follows_is_part_of_it(spec: str) -> None:
    for rows in (1, 16):
        assert lowered(rows, spec, after=lambda y: [y + torch.ones_like(y)]) == ["y"]
        assert lowered(rows, spec, after=lambda y: [gelu(y)]) == ["y"]
        assert lowered(rows, spec, after=lambda y: [y, y + torch.ones_like(y)]) == ["y", "add"]
    assert lowered(16, spec, length=8192, width=512, after=lambda y: [y + torch.ones_like(y)]) == ["y", "sum", "add"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("spec", [W8, W4])
def test_packages_compile_it_in_and_saved_graphs_cannot_name_it(spec: str) -> None:
    assert lowered(16, spec, portable=True, kernels=True) == ["y"]
    assert lowered(16, spec, portable=True, kernels=False)[-1] == "mm"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("spec", [W8, W4])
def test_the_kernel_in_gluon_adds_no_parts_of_k_and_stays_out_of_packages(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "knows_gluon", lambda: True)

    def run(rows: int, *, add: bool, most: int | None = None, **settings: bool) -> list[str]:
        after = (lambda y: [y + torch.ones_like(y)]) if add else None
        return lowered(rows, spec, after=after, length=4096, width=4096, most=most, **settings)

    for rows, most in ((8, None), (16, None), (4, 16)):
        assert run(rows, add=False, most=most) == run(rows, add=True, most=most) == ["weight_only_mm"]
    assert run(8, add=True, portable=True, kernels=True) == ["y", "sum", "add"]
    assert run(17, add=False) == ["y", "sum"] and run(4, add=False, most=17) == ["y", "sum"]
    assert run(1, add=True) == (["y"] if spec == W8 else ["weight_only_mm"])


@pytest.mark.usefixtures("hopper")
def test_a_weight_that_is_quantized_in_the_graph_is_read_as_it_was_written() -> None:
    assert lowered(16, W8, stored=False)[-1] == "y"


def test_reasons_say_why_a_pair_is_dequantized_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "knows_gluon", lambda: False)
    sizes = {"n": 4096, "k": 4096, "capability": (9, 0), "high_precision": torch.bfloat16}

    def reason(a: str, b: str, m: Any = 8, most: int = 8, **facts: Any) -> str:
        left, right = (IDENTITY if not text else QuantSpec.parse(text) for text in (a, b))
        return str(scaled_mm.choose(GemmFacts(a=left, b=right, m=m, most_rows=most, **{**sizes, **facts})))

    assert reason("", W8) == reason("", "per_tensor_e4m3") == reason("", W4) == str(GemmKernel.WEIGHT_ONLY)
    one_sided = "GEMM in high precision, one operand dequantized (emulated: "
    assert reason("", W8, 40, 40) == reason("", W4, None, 128) == str(GemmKernel.WEIGHT_ONLY_WIDE)
    assert reason("", W8, 129, 129) == reason("", W4, None, 10**9) == f"{one_sided}more than 128 rows)"
    assert reason(W8, "") == f"{one_sided}not the right operand alone is quantized)"
    for spec in ("mxfp8_e4m3", "per_row_e5m2", "block_1x128_e4m3", "nvfp4(rht)"):
        assert reason("", spec) == f"{one_sided}no kernel for few rows of these operands)"
    assert reason("", W8, matrices=False) == f"{one_sided}no kernel for few rows of these operands)"
    assert reason("", W8, capability=(8, 9)) == f"{one_sided}no Triton kernel for few rows on this device)"
    assert reason("", W8, triton=False) == f"{one_sided}no Triton kernel for few rows on this device)"
    assert "bfloat16 and float16" in reason("", W8, high_precision=torch.float32)


@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize("size", [(4096, 14336), (14336, 4096), (8192, 28672), (512, 16), (37, 8)])
def test_parts_of_k_cover_it(rows: int, size: tuple[int, int]) -> None:
    k, n = size
    for text, row_bytes in ((W8, k), (W4, k // 2)):
        tiles = Tiles.of(rows, n, QuantSpec.parse(text))
        split, steps = tiles.steps(n, row_bytes)
        step = tiles.k * tiles.warps
        assert (split - 1) * steps * step < row_bytes <= split * steps * step and tiles.m >= rows
    wide = Wide.of(4 * rows)
    split, steps = wide.steps(n, k)
    assert (split - 1) * steps * wide.k < k <= split * steps * wide.k and wide.m >= 4 * rows


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize("recipe", ["weight_only_fp8", "weight_only_nvfp4"])
def test_estimates_choose_it_for_a_program_of_few_rows(
    recipe: str, gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "knows_gluon", lambda: gluon)
    layer = nn.Linear(4096, 14336, bias=False, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8, 4096, device="meta", dtype=torch.bfloat16)
    report = fxquant.explain(layer, recipe, x).on("H100")
    (fprop, *_) = (work for _, _, work in report.work() if work.what == "fprop")
    assert fprop.kernel == str(GemmKernel.WEIGHT_ONLY_DIRECT if gluon else GemmKernel.WEIGHT_ONLY)
    assert fprop.quantized is not None and fprop.unquantized is not None
    assert fprop.quantized < (0.7 if recipe == "weight_only_fp8" else 0.45) * fprop.unquantized
    more = fxquant.explain(layer, recipe, torch.empty(64, 4096, device="meta", dtype=torch.bfloat16)).on("H100")
    (fprop, *_) = (work for _, _, work in more.work() if work.what == "fprop")
    assert fprop.kernel == str(GemmKernel.WEIGHT_ONLY_WIDE) and not fprop.emulated
    more = fxquant.explain(layer, recipe, torch.empty(129, 4096, device="meta", dtype=torch.bfloat16)).on("H100")
    (fprop, *_) = (work for _, _, work in more.work() if work.what == "fprop")
    assert fprop.kernel.endswith("(emulated: more than 128 rows)")
    assert fprop.quantized is not None and fprop.unquantized is not None and fprop.quantized > fprop.unquantized


def test_other_one_sided_formats_stay_emulated() -> None:
    recipe = CustomRecipe(qfactory=Rules([Rule(MXFP8Quantizer(), tensor_type="weight")], default="high_precision"))
    report = fxquant.explain(nn.Linear(64, 96), recipe, torch.randn(8, 64)).on("H100")
    assert all("emulated" in work.kernel for _, _, work in report.work() if work.what == "fprop")
