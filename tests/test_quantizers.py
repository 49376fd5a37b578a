from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from helpers import hybrid
from torch._subclasses.fake_tensor import FakeTensorMode

import fxquant
from fxquant import (
    DType,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    RecipeError,
)
from fxquant.formats import FORMATS
from fxquant.quantizers import QuantizedOperand, quantizer_text
from fxquant.roles import Direction

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

QUANTIZERS = {
    "current": Float8CurrentScalingQuantizer(),
    "current_e5m2_pow2": Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True),
    "rowwise": fxquant.Float8RowwiseQuantizer(),
    "block_1d": fxquant.Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d": fxquant.Float8BlockQuantizer(),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8_2d": MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4_2d": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_rht": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4_rows": NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_4over6": NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
}
each = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def assert_same(a: QuantizedOperand, b: QuantizedOperand) -> None:
    assert torch.equal(bits(a.data), bits(b.data)) and torch.equal(bits(a.scale), bits(b.scale))
    assert (a.global_amax is None) == (b.global_amax is None)
    assert a.global_amax is None or torch.equal(a.global_amax, b.global_amax)


def sample(m: int = 48, k: int = 80, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(m, k) * torch.logspace(-3, 2, k)
    x[:, 5] = 0
    return x.to(dtype)


@each
def test_equal_settings_are_equal_values(quantizer: Quantizer) -> None:
    """Invariant 64."""
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), quantizer.copy()):
        assert twin is not quantizer and twin == quantizer and hash(twin) == hash(quantizer)
    assert len({*QUANTIZERS.values()}) == len(QUANTIZERS)
    names = {cls.__name__: cls for cls in (type(quantizer),)} | {"torch": torch}
    assert eval(repr(quantizer), names) == quantizer


@each
def test_one_direction_alone_is_half_of_both(quantizer: Quantizer) -> None:
    """Invariants 53 and 58."""
    x = sample()
    both = quantizer.quantize(x)
    row, column = quantizer.quantize(x, columnwise=False), quantizer.quantize(x, rowwise=False)
    assert row.columnwise is None and column.rowwise is None
    assert_same(row.rowwise, both.rowwise)
    assert_same(column.columnwise, both.columnwise)


@each
@pytest.mark.parametrize("shape", [(48, 80), (33, 50), (1, 16), (0, 32), (130, 257)], ids=str)
def test_fake_tensors_have_the_real_shapes_and_dtypes(quantizer: Quantizer, shape: tuple[int, int]) -> None:
    """Invariant 64."""
    for direction in Direction:
        spec = str(quantizer.spec(direction))
        real = torch.ops.fxquant.quantize(torch.randn(shape), spec, str(direction))
        with FakeTensorMode():
            fake = torch.ops.fxquant.quantize(torch.randn(shape), spec, str(direction))
        described = [[(t.shape, t.dtype, t.is_contiguous()) for t in tensors] for tensors in (real, fake)]
        assert described[0] == described[1]


@each
def test_operators_pass_torchs_check_of_fake_tensors(quantizer: Quantizer) -> None:
    def check(op, *args) -> None:
        torch.library.opcheck(op, args, test_utils="test_faketensor")

    spec, ops = str(quantizer.spec(Direction.ROWWISE)), torch.ops.fxquant
    parts = ops.quantize(sample(), spec, "rowwise")
    check(ops.hybrid_quantize.default, sample(), spec, spec)
    check(ops.dequantize.default, parts, spec, "rowwise", [48, 80], torch.float32)
    check(ops.scaled_mm.default, parts, parts, spec, spec, None, torch.bfloat16, False)


@each
def test_payload_and_scales_have_torchs_dtypes_and_no_visible_padding(quantizer: Quantizer) -> None:
    q = quantizer.quantize(torch.randn(33, 50))
    packed = q.rowwise.data.dtype is torch.float4_e2m1fn_x2
    assert q.rowwise.data.dtype == row_of(quantizer).element.dtype
    assert q.rowwise.scale.dtype == row_of(quantizer).scale_dtype
    assert q.rowwise.data.shape == ((33, 32) if packed else (33, 50))
    assert q.columnwise.data.shape == ((50, 24) if packed else (50, 33))
    assert (q.rowwise.global_amax is not None) == packed


def row_of(quantizer: Quantizer):
    return FORMATS[quantizer.spec(Direction.ROWWISE).format]


@pytest.mark.parametrize("quantizer", [q for n, q in QUANTIZERS.items() if "rht" not in n], ids=lambda q: str(q))
def test_dequantized_values_are_near_in_both_directions(quantizer: Quantizer) -> None:
    x = torch.randn(3, 11, 50)
    q = quantizer.quantize(x)
    element = row_of(quantizer).element
    for direction in ("rowwise", "columnwise"):
        back = q.dequantize(direction)
        assert back.shape == x.shape and back.dtype == torch.float32
        assert (back - x).norm() / x.norm() < 2.0 ** -(element.mantissa_bits + 1)


def test_padding_never_touches_scales() -> None:
    """Ragged edges use the elements that exist: what lies behind them in memory does not count."""
    whole = torch.full((40, 72), 1e4)
    x = whole[:33, :50]
    x.copy_(torch.randn(33, 50))
    for quantizer in QUANTIZERS.values():
        a, b = quantizer.quantize(x), quantizer.quantize(x.clone())
        assert_same(a.rowwise, b.rowwise)
        assert_same(a.columnwise, b.columnwise)


@each
def test_non_contiguous_tensors_quantize_like_their_copies(quantizer: Quantizer) -> None:
    """Invariant 57."""
    x = torch.randn(80, 2, 48).permute(1, 2, 0)[1]
    a, b = quantizer.quantize(x), quantizer.quantize(x.contiguous())
    assert_same(a.rowwise, b.rowwise)
    assert_same(a.columnwise, b.columnwise)


@pytest.mark.parametrize("k", [-100, -8, 0, 1, 60])
def test_mxfp8_amax_at_the_maximum_keeps_its_exponent(k: int) -> None:
    """Invariant 52: a block whose amax is 448 * 2^k gets code 127 + k; just above it, one more."""
    x = torch.full((2, 32), 2.0**k)
    x[0, 3] = 448 * 2.0**k
    x[1, 3] = torch.nextafter(x[0, 3], torch.tensor(torch.inf))
    assert bits(MXFP8Quantizer().quantize(x).rowwise.scale).flatten().tolist() == [127 + k, 128 + k]


def test_mxfp8_scale_codes_at_the_ends() -> None:
    """Invariant 52: code 0 stands for 2^-127 and 255 for NaN."""
    data = torch.ones(1, 64).to(E4M3)
    codes = torch.tensor([[0, 255]], dtype=torch.uint8)
    values = torch.ops.fxquant.dequantize([data, codes], "mxfp8_e4m3", "rowwise", [1, 64], torch.float32)
    assert (values[0, :32] == 2.0**-127).all() and values[0, 32:].isnan().all()
    assert bits(MXFP8Quantizer().quantize(torch.zeros(1, 32)).rowwise.scale).item() == 0


@pytest.mark.parametrize("name", ["mxfp8_2d", "nvfp4_2d", "block_2d"])
def test_tiles_give_both_directions_the_same_bytes(name: str) -> None:
    """Invariants 54 and 63: a 2-d column half is the transpose of the row half."""
    quantizer = QUANTIZERS[name]
    q = quantizer.quantize(sample(96, 160))
    assert torch.equal(q.dequantize("rowwise"), q.dequantize("columnwise"))
    if q.rowwise.data.dtype == E4M3:
        assert torch.equal(bits(q.rowwise.data).mT, bits(q.columnwise.data))


@pytest.mark.parametrize("name", ["block_1d", "mxfp8", "nvfp4", "rowwise"])
def test_the_column_half_is_quantized_from_the_source(name: str) -> None:
    """Invariant 63: not from the row half."""
    quantizer, x = QUANTIZERS[name], sample(160, 160)
    q = quantizer.quantize(x)
    assert_same(q.columnwise, quantizer.quantize(x.mT.contiguous()).rowwise)
    assert not torch.equal(q.dequantize("rowwise"), q.dequantize("columnwise"))


def test_identity_column_from_the_row_half_is_its_dequantized_value() -> None:
    """Invariant 27."""
    x = sample()
    q = hybrid(MXFP8Quantizer(), IdentityQuantizer(), "rowwise_dequantized").quantize(x)
    assert q.columnwise.scale is None
    assert torch.equal(q.columnwise.data, MXFP8Quantizer().quantize(x).dequantize().bfloat16().mT)


@pytest.mark.parametrize("row", ["current", "mxfp8", "nvfp4", "block_1d"])
def test_column_from_the_row_half_does_not_need_the_row_half_asked_for(row: str) -> None:
    """Invariant 28."""
    quantizer = hybrid(QUANTIZERS[row], NVFP4Quantizer(), "rowwise_dequantized")
    x = sample()
    alone, both = quantizer.quantize(x, rowwise=False), quantizer.quantize(x)
    assert alone.rowwise is None
    assert_same(alone.columnwise, both.columnwise)
    source = QUANTIZERS[row].quantize(x).dequantize().to(x.dtype)
    assert_same(both.columnwise, NVFP4Quantizer().quantize(source).columnwise)


def test_hybrid_takes_each_direction_from_its_own_quantizer() -> None:
    x = sample()
    q = hybrid(MXFP8Quantizer(), NVFP4Quantizer()).quantize(x)
    assert_same(q.rowwise, MXFP8Quantizer().quantize(x).rowwise)
    assert_same(q.columnwise, NVFP4Quantizer().quantize(x).columnwise)


def test_identity_casts_when_asked() -> None:
    """Invariant 51."""
    x = sample(dtype=torch.float32)
    assert IdentityQuantizer().quantize(x).rowwise.data.dtype == torch.float32
    assert IdentityQuantizer(dtype=torch.bfloat16).quantize(x).columnwise.data.dtype == torch.bfloat16
    assert IdentityQuantizer().is_identity and not IdentityQuantizer(dtype=torch.bfloat16).is_identity


def test_a_missing_direction_is_named() -> None:
    """Invariant 34."""
    with pytest.raises(RecipeError, match="columnwise representation is not available"):
        MXFP8Quantizer().quantize(sample(), columnwise=False).dequantize("columnwise")


def test_only_floating_point_tensors_are_quantized() -> None:
    for x in (torch.ones(4, 4, dtype=torch.int32), torch.tensor(1.0), torch.ones(4, 4, dtype=torch.complex64)):
        with pytest.raises(RecipeError, match="only floating-point tensors"):
            MXFP8Quantizer().quantize(x)


@each
def test_a_quantizer_dequantizes_what_it_gave(quantizer: Quantizer) -> None:
    q = quantizer.quantize(sample())
    assert torch.equal(quantizer.dequantize(q), q.dequantize("rowwise"))
    column = quantizer.quantize(sample(), rowwise=False)
    assert torch.equal(quantizer.dequantize(column), column.dequantize("columnwise"))
    with pytest.raises(RecipeError, match="dequantizes what its quantize gave, not a QuantizedOperand"):
        quantizer.dequantize(q.rowwise)


def test_a_quantized_tensor_prints_in_one_line() -> None:
    q = hybrid(MXFP8Quantizer(), NVFP4Quantizer()).quantize(sample())
    assert str(q) == (
        "QuantizedTensor(shape=[48, 80], dtype=bfloat16, rowwise=mxfp8_e4m3 of float8_e4m3fn [48, 80], "
        "columnwise=nvfp4 of float4_e2m1fn_x2 [80, 24], 6,148 bytes)"
    )
    assert repr(q.rowwise) == (
        "QuantizedOperand(data=float8_e4m3fn [48, 80], scale=float8_e8m0fnu [48, 3], 3,984 bytes)"
    )
    own = fxquant.QuantizedTensor(QuantizedOperand(torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1)))
    assert str(own) == "QuantizedTensor(rowwise=int8 [2, 4], 16 bytes)"
    with pytest.raises(RecipeError, match=r"quantizer.dequantize\(q.rowwise\) gives"):
        own.dequantize()
    with pytest.raises(AttributeError, match="has no 'data': its halves have"):
        own.data  # noqa: B018


def test_words_for_directions_are_directions() -> None:
    transformed = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    assert (
        transformed.spec("columnwise").rht and hybrid(MXFP8Quantizer(), transformed).side("columnwise") is transformed
    )
    with pytest.raises(RecipeError, match="not 'column'; did you mean 'columnwise'"):
        transformed.spec("column")


def test_hybrid_refuses_what_it_cannot_hold() -> None:
    """Invariant 40."""
    one = MXFP8Quantizer()
    with pytest.raises(ValueError, match="the same object"):
        fxquant.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=one)
    with pytest.raises(TypeError, match="columnwise_quantizer must be a Quantizer, not str"):
        fxquant.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer="mxfp8")
    with pytest.raises(TypeError, match="rowwise_quantizer must be a Quantizer, not DelayedScalingRequest"):
        fxquant.HybridQuantizer(rowwise_quantizer=fxquant.DelayedScalingRequest(), columnwise_quantizer=one)
    with pytest.raises(TypeError, match="itself a HybridQuantizer"):
        fxquant.HybridQuantizer(rowwise_quantizer=hybrid(one, MXFP8Quantizer()), columnwise_quantizer=one)
    with pytest.raises(ValueError, match="'original' or 'rowwise_dequantized', not 'row'"):
        hybrid(one, MXFP8Quantizer(), "row")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float8CurrentScalingQuantizer(torch.bfloat16), "fp8_dtype must be"),
        (lambda: fxquant.Float8RowwiseQuantizer(torch.float32), "fp8_dtype must be"),
        (lambda: fxquant.Float8BlockQuantizer(block_scaling_dim=3), "block_scaling_dim must be 1 or 2"),
        (lambda: MXFP8Quantizer(scale_mode="up"), "scale_mode must be 'rceil', 'floor', 'ceil' or 'even', not 'up'"),
        (lambda: NVFP4Quantizer(fp4_dtype=E4M3), "fp4_dtype must be"),
        (lambda: NVFP4Quantizer(with_rht=True), "with_post_rht_amax=True"),
        (
            lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True, with_post_rht_amax=True),
            "row_scaled_nvfp4 does not go with with_rht",
        ),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True), "with_2d_quantization"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True), "stochastic_rounding"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), "stochastic_rounding"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=128), "must be 448 or 256"),
        (lambda: NVFP4Quantizer(nvfp4_e4m3_max=256), "setting of 4over6"),
        (lambda: NVFP4Quantizer(nvfp4_4over6_err_mode="mae"), "must be 'MAE' or 'MSE'"),
    ],
)
def test_settings_are_checked_where_they_are_given(make, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def test_transformer_engines_calls_work() -> None:
    assert Float8CurrentScalingQuantizer(fp8_dtype=DType.kFloat8E5M2, device="cuda").fp8_dtype == E5M2
    assert MXFP8Quantizer(fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=False) == MXFP8Quantizer()
    made = fxquant.Float8BlockQuantizer(
        fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=True, amax_epsilon=0.0, force_pow_2_scales=True,
        block_scaling_dim=1,
    )  # fmt: skip
    assert made == QUANTIZERS["block_1d"]
    assert NVFP4Quantizer(fp4_dtype=DType.kFloat4E2M1, with_2d_quantization=True) == QUANTIZERS["nvfp4_2d"]


def test_text_shows_what_differs_from_the_default() -> None:
    assert quantizer_text(MXFP8Quantizer()) == "MXFP8Quantizer()"
    text = quantizer_text(Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True))
    assert text == "Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2, force_pow_2_scales=True)"


def test_quantizers_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MXFP8Quantizer().scale_mode = "floor"  # type: ignore[misc]
