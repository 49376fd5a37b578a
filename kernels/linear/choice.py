"""The kernels that a GEMM of quantized operands can be, and their conditions: formats, sizes and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.compat.device import capability, knows_gluon
from fxquant.compat.values import statically_known_true, upper_bound
from fxquant.formats import QuantSpec, is_mixed
from fxquant.kernels.linear import few_rows as limits
from fxquant.kernels.linear import weight_only as one_sided_limits
from fxquant.kernels.operator import Dim, Facts, Kernel, Parts

GEMM = ("auto", "cublas", "triton", "autotune")
"""The ways to decide between cuBLAS and Triton where both have a GEMM: by rates, for one of them, or by measuring."""


NO_FP8 = "no FP8 GEMM on this device"
"""The reason why no scaled GEMM multiplies on cards before compute capability 8.9."""
MIXED = "emulated: no GEMM takes the two formats together"
"""The reason why a pair of two quantized formats is emulated."""


class GemmKernel(Kernel):
    """The kernels that a GEMM of quantized operands can be."""

    FEW_ROWS = "Triton, few rows"
    WEIGHT_ONLY_DIRECT = "Triton's Gluon, few rows, the weight dequantized as it is read"
    WEIGHT_ONLY = "Triton, few rows, the weight dequantized as it is read"
    WEIGHT_ONLY_WIDE = "Triton, up to 128 rows, the weight dequantized as it is read"
    PER_ROW = "cuBLAS _scaled_mm, rowwise"
    PER_TENSOR = "cuBLAS _scaled_mm, per tensor"
    MXFP8 = "cuBLAS scaled_mm, MXFP8"
    NVFP4 = "cuBLAS scaled_mm, NVFP4"
    BLOCKS_WARPS = "Triton's Gluon, 1x128 by 1x128"
    TILES_WARPS = "Triton's Gluon, 1x128 by 128x128"
    BLOCKS = "cuBLAS _scaled_mm, 1x128 by 1x128"
    TILES = "cuBLAS _scaled_mm, 1x128 by 128x128"
    TRITON = "Triton GEMM"
    GROUPED_PORTABLE = "bf16 GEMMs that every device has"
    GROUPED_MXFP8 = "scaled_grouped_mm, MXFP8"
    GROUPED_NVFP4 = "scaled_grouped_mm, NVFP4"
    GROUPED = "_scaled_grouped_mm"
    GROUPED_FAST = "Triton, grouped FP8, fast accumulation"
    GROUPED_TRITON = "Triton, grouped FP8"
    GROUPED_WARPS = "Triton's Gluon, grouped FP8, block scales"
    GROUPED_BLOCKS = "Triton, grouped FP8, block scales"
    ONE_SIDED = "GEMM in high precision, one operand dequantized"
    EMULATED = "bf16 GEMM of dequantized operands"
    REFERENCE = "float32 GEMM of dequantized operands"
    OWN = "the quantizer's own code"


@dataclass(frozen=True, kw_only=True)
class GemmFacts(Facts):
    """A GEMM a [M, K] x b [N, K]^T, or of batches of `matrices` where that is False.

    `most_rows` is the largest M. `fast_accum` says that sums may be kept in tensor cores throughout. `high_precision`
    is the dtype of an operand that is not quantized, None where both are.
    """

    a: QuantSpec
    b: QuantSpec
    m: Dim
    n: Dim
    k: Dim
    most_rows: int
    matrices: bool = True
    fast_accum: bool = False
    high_precision: torch.dtype | None = None

    @classmethod
    def of(
        cls, a: Parts, b: Parts, a_spec: str, b_spec: str, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool,
        **more: object,
    ) -> GemmFacts:  # fmt: skip
        """The facts of the arguments of `fxquant::scaled_mm`."""
        x, w = a[0], b[0]
        left, right = QuantSpec.parse(a_spec), QuantSpec.parse(b_spec)
        whole = x if left.is_identity else w if right.is_identity else None
        return cls(
            a=left, b=right, m=x.shape[-2], n=w.shape[-2], k=(x if left.is_identity else w).shape[-1],
            most_rows=upper_bound(x.shape[-2]),
            matrices=x.ndim == w.ndim == 2, fast_accum=fast_accum, capability=capability(w.device),
            high_precision=None if whole is None else whole.dtype,
        )  # fmt: skip


def few_rows(facts: GemmFacts) -> str:
    """Returns why the kernel that reads the weight once does not take a GEMM, "" if it does."""
    if not (facts.triton and facts.on_hopper):
        return "no Triton kernel for few rows on this device"
    if not (facts.matrices and facts.fast_accum and limits.supports(facts.a, facts.b)):
        return "no kernel for few rows of these operands"
    return "" if _has_at_most(limits.MOST_TOKENS, facts) else "more than a few rows"


def weight_only(facts: GemmFacts) -> str:
    """Returns why the kernel that dequantizes the weight as it reads it does not take a GEMM, "" if it does."""
    few = one_sided_limits.FEW_ROWS
    return weight_only_wide(facts) or ("" if _has_at_most(few, facts) else f"more than {few} rows")


def weight_only_wide(facts: GemmFacts) -> str:
    """Returns why the kernel that does so for more rows does not take a GEMM, "" if it does."""
    if not facts.a.is_identity or facts.b.is_identity:
        return "not the right operand alone is quantized"
    if not (facts.triton and facts.on_hopper):
        return "no Triton kernel for few rows on this device"
    if facts.high_precision not in one_sided_limits.DTYPES:
        return "its kernel for few rows takes bfloat16 and float16"
    if not (facts.matrices and one_sided_limits.supports(facts.b)):
        return "no kernel for few rows of these operands"
    most = one_sided_limits.MOST_ROWS
    return "" if _has_at_most(most, facts) else f"more than {most} rows"


def _has_at_most(rows: int, facts: GemmFacts) -> bool:
    """Returns True if other sizes are known, and there is a row, and no more than so many."""
    static = all(isinstance(size, int) and size > 0 for size in (facts.most_rows, facts.n, facts.k))
    return static and facts.most_rows <= rows and facts.m != 0


def weight_only_direct(facts: GemmFacts) -> str:
    """Returns why that kernel is not the one in Gluon."""
    reason = weight_only(facts)
    if reason:
        return reason
    if not (facts.launches and knows_gluon() and facts.high_precision == torch.bfloat16):
        return "not bfloat16 beside fxquant and the Triton with the kernel's Gluon"
    k, n = facts.k, facts.n
    assert isinstance(k, int) and isinstance(n, int)
    row_bytes = k // 2 if one_sided_limits.is_packed(facts.b) else k
    if one_sided_limits.is_vector(facts.m, row_bytes, facts.b) and row_bytes <= one_sided_limits.VECTOR_BYTES:
        return "one row is a matrix-vector product"
    tiles = one_sided_limits.Direct.of(facts.most_rows, n, row_bytes, facts.b)
    return "" if tiles else "Triton's own kernel is the faster one for these sizes, or takes them alone"


def _why_emulated(facts: GemmFacts) -> str:
    """Returns why a mixed pair is emulated."""
    one_sided = facts.a.is_identity != facts.b.is_identity
    return f"emulated: {weight_only_wide(facts)}" if one_sided else MIXED


def per_tensor(facts: GemmFacts) -> str:
    """Returns why cuBLAS does not multiply by one scale of each tensor."""
    reason = _no_long_scales(facts)
    return reason or ("scales of rows" if "per_row" in (facts.a.row.family, facts.b.row.family) else "")


def per_row(facts: GemmFacts) -> str:
    """Returns why cuBLAS does not multiply by scales of rows."""
    reason = _no_long_scales(facts)
    return reason or ("" if "per_row" in (facts.a.row.family, facts.b.row.family) else "no scales of rows")


def _no_product_of_matrices(facts: GemmFacts) -> str:
    """Returns why no library multiplies the operands on a GPU, whatever their scales."""
    if is_mixed(facts.a, facts.b):
        return _why_emulated(facts)
    if not facts.on_cuda:
        return "the reference"
    return "" if facts.matrices else "a batch of matrices"


def _no_long_scales(facts: GemmFacts) -> str:
    if reason := _no_product_of_matrices(facts):
        return reason
    if facts.a.row.family not in ("per_tensor", "per_row"):
        return "scales of blocks"
    return "" if facts.makes_fp8 else NO_FP8


def mxfp8(facts: GemmFacts) -> str:
    """Returns why tensor cores do not multiply MXFP8 with its scales."""
    return _no_tensor_core_scales(facts) or ("" if facts.a.row.family == "mxfp8" else "scales of NVFP4")


def nvfp4(facts: GemmFacts) -> str:
    """Returns why tensor cores do not multiply NVFP4 with its scales."""
    return _no_tensor_core_scales(facts) or ("" if facts.a.row.family == "nvfp4" else "scales of MXFP8")


def reads_tiles(a: QuantSpec, b: QuantSpec, n: Dim, k: Dim, card: tuple[int, int]) -> bool:
    """Returns True if tensor cores of a card multiply matrices with the scales of their blocks, in tiles."""
    facts = GemmFacts(a=a, b=b, m=None, n=n, k=k, most_rows=1 << 31, capability=card)
    return not (mxfp8(facts) and nvfp4(facts))


def _no_tensor_core_scales(facts: GemmFacts) -> str:
    """Returns why tensor cores do not read the scales of the operands' blocks themselves, as those of Blackwell do.

    Columns of the result, which are padded to a multiple of 16, have to be known, and packages hold no such GEMM.
    """
    if reason := _no_product_of_matrices(facts):
        return reason
    family = facts.a.row.family
    if family not in ("mxfp8", "nvfp4"):
        return "scales of no tensor core"
    if not facts.reads_block_scales:
        return f"no FP8 GEMM for {family} scales"
    if not facts.launches:
        return f"no GEMM for {family} scales in a package"
    if not isinstance(facts.n, int):
        return "dynamic sizes"
    if facts.k is None or not statically_known_true(facts.k > 0):
        return "a sum of nothing"
    return "" if facts.n > 0 else "an empty result"


def tiles_by_warps(facts: GemmFacts) -> str:
    """Returns why the kernel in Gluon does not multiply 1x128-scaled `a` by 128x128-scaled `b`."""
    return _no_mm_by_warps(facts) or _other_blocks(facts, 128)


def blocks_by_warps(facts: GemmFacts) -> str:
    """Returns why the kernel in Gluon does not multiply 1x128-scaled `a` by 1x128-scaled `b`."""
    return _no_mm_by_warps(facts) or _other_blocks(facts, 1)


def tiles(facts: GemmFacts) -> str:
    """Returns why cuBLAS does not multiply 1x128-scaled `a` by 128x128-scaled `b`."""
    return _no_block_mm(facts) or _other_blocks(facts, 128)


def blocks(facts: GemmFacts) -> str:
    """Returns why cuBLAS does not multiply 1x128-scaled `a` by 1x128-scaled `b`."""
    return _no_block_mm(facts) or _other_blocks(facts, 1)


def _other_blocks(facts: GemmFacts, rows: int) -> str:
    """Returns what other scales `b` has than those of so many rows."""
    if facts.b.row.block[0] == rows:
        return ""
    return "scales of 1x128" if rows == 128 else "scales of tiles"


def _no_block_scales(facts: GemmFacts) -> str:
    """Returns why nothing multiplies these blocks with their scales.

    Hopper alone has GEMMs of 1x128-scaled `a` and 1x128- or 128x128-scaled `b`, both e4m3.
    """
    a, b = facts.a, facts.b
    if is_mixed(a, b):
        return _why_emulated(facts)
    if not facts.on_cuda:
        return "the reference"
    if not facts.matrices:
        return "a batch of matrices"
    if a.row.family in ("mxfp8", "nvfp4"):
        return _no_tensor_core_scales(facts) or "multiplied by tensor cores"
    if a.row.family != "block":
        return "no FP8 GEMM" if facts.makes_fp8 else NO_FP8
    if a.row.block != (1, 128):
        return "the left operand is scaled in tiles" if a.row.block[0] > 1 else "blocks of another length than 128"
    for spec in (a, b):
        if spec.row.element is None or spec.row.element.name != "e4m3":
            return "not e4m3 by e4m3"
    return "" if facts.on_hopper else "no block scales on this device"


def _no_block_mm(facts: GemmFacts) -> str:
    """Returns why cuBLAS has no GEMM of these blocks; it wants whole 128x128 tiles of `b`, sizes in multiples of 16."""
    if reason := _no_block_scales(facts):
        return reason
    multiple = 16 if facts.b.row.block[0] == 1 else 128
    for size, by in ((facts.m, 16), (facts.n, multiple)):
        if size is None or not statically_known_true(size % by == 0):
            return f"{size} rows are no multiple of {by}" if isinstance(size, int) else "dynamic sizes"
    return "" if facts.m is not None and statically_known_true(facts.m > 0) else "no rows"


LEAST_WORK_BY_WARPS = 1 << 38
"""FLOPs, about a quarter of a millisecond: a launch of Gluon from Python takes longer than one of cuBLAS."""
_LEAST_SIZE_BY_WARPS = 1024


def _no_mm_by_warps(facts: GemmFacts) -> str:
    """Returns why the kernel in Gluon does not multiply these blocks: TMA copies rows in multiples of 16 bytes."""
    if reason := _no_block_scales(facts):
        return reason
    if not (facts.triton and facts.launches and knows_gluon()):
        return "not beside fxquant and the Triton with the kernel's Gluon"
    m, n, k = facts.m, facts.n, facts.k
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)):
        return "dynamic sizes"
    if n % 16 or k % 16:
        return f"{n if n % 16 else k} is no multiple of 16"
    large = min(m, n) >= _LEAST_SIZE_BY_WARPS and 2 * m * n * k >= LEAST_WORK_BY_WARPS
    return "" if large else "cuBLAS is launched faster"


def one_sided(facts: GemmFacts) -> str:
    """Returns why a pair is not multiplied in the dtype of the operand that is not quantized."""
    if facts.high_precision is None or not is_mixed(facts.a, facts.b):
        return "both operands are quantized"
    return "" if facts.on_cuda and facts.high_precision in (torch.bfloat16, torch.float16) else "a float32 GEMM"


def emulated(facts: GemmFacts) -> str:
    """Returns why bfloat16 does not hold the values of both operands."""
    if is_mixed(facts.a, facts.b):
        return _why_emulated(facts)
    exact = facts.on_cuda and all(exact_in_bfloat16(spec) or _scaled_after(facts, spec) for spec in (facts.a, facts.b))
    return "" if exact else "values that bfloat16 rounds"


def _scaled_after(facts: GemmFacts, spec: QuantSpec) -> bool:
    """Returns True if bfloat16 holds the elements, whose scales the result gets: on cards without an FP8 GEMM."""
    return not facts.makes_fp8 and facts.matrices and spec.row.family in ("per_tensor", "per_row")


def exact_in_bfloat16(spec: QuantSpec) -> bool:
    """Returns True if element x block scale fits bfloat16's 8 bits of significand: the GEMM sees the exact values."""
    if spec.row.element is None or not spec.row.block[1]:
        return False
    bits: dict[torch.dtype | None, int] = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 4}
    scale = bits.get(spec.row.scale_dtype, 1 if spec.pow2 else 24)
    return spec.row.element.mantissa_bits + 1 + scale <= 8
