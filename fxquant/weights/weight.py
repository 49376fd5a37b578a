"""A parameter in quantized form: the one subclass of Tensor that fxquant has.

    QuantizedWeight("mxfp8_e4m3", master=w)                      # a shard of FSDP2: quantized when it is gathered
    QuantizedWeight("mxfp8_e4m3", rowwise=[..], columnwise=[..], size=.., dtype=..)     # what was gathered
    QuantizedWeight("mxfp8_e4m3", master=w, rowwise=[..])        # kept quantized, and trained through its master

It stands in modules and never in a compiled graph: AOTAutograd takes it apart into its plain tensors, and
`fxquant::linear` asks it for the parts of a direction (`held`), which go into the GEMM as they are. Every other
operator sees its values. What is written into it is written into the master; the parts are quantized again, in place,
before a graph reads them next (`refresh`), however many writes a step of an optimizer consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxquant.compat.inside.subclass import is_allocated, no_torch_function, writes, written
from fxquant.compat.private import tree_map_only, uncaptured
from fxquant.errors import ArgumentError, FxQuantWarning, RecipeError, tell
from fxquant.formats import OperandSpec, QuantSpec
from fxquant.kernels.cast.ops import HoldsQuantized, dequantize_operand, parts_spec
from fxquant.kernels.cast.ops import amax as tensor_amax
from fxquant.roles import Direction
from fxquant.weights.layer import Layer
from fxquant.weights.parts import in_order, is_one, laid_out, plain_spec, quantized, side, transposed

if TYPE_CHECKING:
    from fxquant.weights.fsdp import Sent

aten = torch.ops.aten

_VIEWS = {aten.detach.default, aten.alias.default}
_COPIES = {aten.clone.default, aten._pin_memory.default}
"""Operators that are applied to every tensor inside, and keep the values."""

_SHAPED = {
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.empty_like.default,
}
"""Operators by which FSDP2 cuts, pads and flattens a parameter: of one that has a master they give its master alone."""

_NEW = {aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default}

_SET = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.uniform_.default, aten.normal_.default}
"""Operators that give a weight new values, whatever it was."""

_PREFIXES = {Direction.ROWWISE: "row", Direction.COLUMNWISE: "column"}


class QuantizedWeight(HoldsQuantized):
    """A weight [N, K] with its quantized parts in one or both directions, its values in high precision, or both.

    `spec` is the text of an `OperandSpec`. The parts of a direction are those of `fxquant::quantize`; where rowwise
    ones stand for both (`is_one`), they are all there is. `whole_amax` [1] is that of the values before they were
    quantized, which delayed scaling records.
    """

    master: Tensor | None
    whole_amax: Tensor | None
    spec: str
    layer: Layer
    _seen: tuple[int, ...]
    _cast: torch.dtype

    @staticmethod
    def __new__(
        cls, spec: str, *, master: Tensor | None = None, rowwise: Sequence[Tensor] = (),
        columnwise: Sequence[Tensor] = (), size: Sequence[int] | None = None, dtype: torch.dtype | None = None,
        layer: Layer | None = None,
    ) -> QuantizedWeight:  # fmt: skip
        inner = next(t for t in (master, *rowwise, *columnwise) if t is not None)
        if master is not None:
            size, dtype = master.shape, dtype or master.dtype
        assert size is not None and dtype is not None
        weight: QuantizedWeight = cls._make_wrapper_subclass(
            cls, tuple(size), strides=None if master is None else master.stride(), dtype=dtype, device=inner.device
        )
        weight.master, weight.whole_amax, weight.spec, weight.layer = master, None, spec, layer or Layer()
        for direction, parts in ((Direction.ROWWISE, rowwise), (Direction.COLUMNWISE, columnwise)):
            for i, part in enumerate(parts):
                setattr(weight, f"{_PREFIXES[direction]}{i}", part)
        weight._seen, weight._cast = weight._writes(), dtype
        return weight

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is set by `__new__`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        inner = ", ".join(self.__tensor_flatten__()[0])
        return f"QuantizedWeight({self.spec}, {list(self.shape)}, {self.dtype}, holds {inner})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        names = ["master", "whole_amax", *(f"{prefix}{i}" for prefix in _PREFIXES.values() for i in range(3))]
        return [name for name in names if getattr(self, name, None) is not None], (self.spec, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], meta: tuple[str, torch.dtype], size: torch.Size, stride: Sequence[int]
    ) -> QuantizedWeight:
        spec, dtype = meta
        row, column = ([inner[n] for n in sorted(inner) if n.startswith(prefix)] for prefix in _PREFIXES.values())
        master = inner.get("master")
        new = QuantizedWeight(spec, master=master, rowwise=row, columnwise=column, size=size, dtype=dtype)
        new.whole_amax = inner.get("whole_amax")
        return new

    def parts(self, direction: Direction | str) -> list[Tensor]:
        """The parts of one direction; empty where it is not held."""
        names = [f"{_PREFIXES[Direction(direction)]}{i}" for i in range(3)]
        return [part for name in names if (part := getattr(self, name, None)) is not None]

    @property
    def is_stored(self) -> bool:
        """True for a weight that has quantized parts, and not a master alone."""
        return any(map(self.parts, Direction))

    @property
    def is_one(self) -> bool:
        """True for a weight whose rowwise parts are the columnwise ones too."""
        return is_one(OperandSpec.parse(self.spec), self.shape)

    def held(self, spec: OperandSpec, direction: str) -> tuple[list[Tensor], QuantSpec] | None:
        parts, row = self.parts(direction), self.parts(Direction.ROWWISE)
        if side(spec, direction).is_identity or not (parts or row):
            return None
        if not fits(self.spec, spec):
            raise RecipeError(mismatch(self.layer.name, self.spec, spec))
        stored = OperandSpec.parse(self.spec)
        if not parts and self.is_one:
            return transposed(row, stored), side(plain_spec(stored), direction)
        return (parts, side(stored, direction)) if parts else None

    def in_order(self, order: OperandSpec | None = None) -> QuantizedWeight:
        """The same weight with its scales in the order of a spec, or of its device's tensor cores."""
        stored = OperandSpec.parse(self.spec)
        order = laid_out(stored, self.device) if order is None else order
        if order == stored:
            return self
        row, column = (in_order(self.parts(d), side(stored, d), side(order, d)) for d in Direction)
        new = QuantizedWeight(
            str(order), master=self.master, rowwise=row, columnwise=column, size=self.size(), dtype=self.dtype,
            layer=self.layer,
        )  # fmt: skip
        new.whole_amax, new._cast = self.whole_amax, self._cast
        if self._seen != self._writes():
            new._seen = ()
        return new

    def values(self) -> Tensor:
        """The values as a plain tensor: those of the master, or else of a direction that is there."""
        if self.master is not None:
            return self.master.to(self.dtype)
        self._tell_rounded()
        spec = OperandSpec.parse(self.spec)
        present = [d for d in Direction if (parts := self.parts(d)) and all(map(is_allocated, parts))]
        direction = next(iter(present), Direction.ROWWISE)
        text = str(side(spec, direction))
        return dequantize_operand(self.parts(direction), text, str(direction), self.shape, self.dtype)

    def _tell_rounded(self) -> None:
        """Warns once of a layer whose weight FSDP2 gathered quantized, and that no graph of fxquant runs."""
        if self.layer.outputs and not self.layer.told and all(map(_is_real, self.parts(Direction.ROWWISE))):
            self.layer.told = True
            tell(
                f"{self.layer.name}.weight was gathered quantized, and is read outside of the graphs of fxquant, where "
                "that is rounding for nothing: leave the layer out of prepare_fsdp (`blocks`), or compile it",
                FxQuantWarning,
            )

    def _writes(self) -> tuple[int, ...]:
        """The numbers of writes: of operators on the weight, and as torch counts through views of it or the master."""
        return self.layer.writes, writes(self), 0 if self.master is None else writes(self.master)

    def set_master(self, values: Tensor) -> None:
        """Gives a weight that has none a master with the values of its parts."""
        self.master = values
        self._seen = self._writes()

    def refresh(self, dtype: torch.dtype | None = None) -> None:
        """Quantizes the master again if it was written since the parts were made, or is read in another dtype."""
        if self.master is None or not self.is_stored or not _is_real(self.master):
            return
        dtype = dtype or self._cast
        if self._seen != self._writes() or self._cast != dtype:
            self._cast = dtype
            self.quantize_again(self.master.to(dtype))

    def quantize_again(self, values: Tensor | None = None) -> None:
        """Makes the parts anew, in their memory: from the master, or from other values."""
        values = self.values() if values is None else values
        for direction in Direction:
            parts = self.parts(direction)
            spec, run = OperandSpec.parse(self.spec), self.layer.quantize
            new = quantized(values, spec, direction, run=run) if parts else []
            for part, value in zip(parts, new, strict=True):
                part.copy_(value)
        self._seen = self._writes()

    def of(self, values: Tensor) -> QuantizedWeight:
        """A weight of other values, stored as this one is."""
        spec, parts = laid_out(OperandSpec.parse(self.spec), values.device), dict[Direction, list[Tensor]]()
        for direction in Direction:
            parts[direction] = quantized(values, spec, direction) if self.parts(direction) else []
        row, column = parts.values()
        return QuantizedWeight(
            str(spec), master=None if self.master is None else values, rowwise=row, columnwise=column,
            size=values.shape, dtype=values.dtype, layer=self.layer,
        )  # fmt: skip

    @property
    def data(self) -> Tensor:
        """The weight without its history; what is assigned is written into it, in its memory."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ArgumentError(
                f"{self.layer.name}.weight is {list(self.shape)}, and cannot become {list(values.shape)}"
            )
        with torch.no_grad():
            self.copy_(values)

    def share_memory_(self) -> QuantizedWeight:
        """Moves all that is inside into memory that processes share."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values that the weight began with, on the CPU; None where they are not preserved."""
        return self.layer.initial

    def clear_high_precision_init_val(self) -> None:
        """Lets go of the values that the weight began with."""
        self.layer.initial = None

    def over(
        self, run: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None, *, view: bool = False
    ) -> QuantizedWeight:
        """The same weight with a function applied to each of its tensors; a `view` is in the same memory."""
        row, column = ([run(part) for part in self.parts(direction)] for direction in Direction)
        master = None if self.master is None else run(self.master)
        new = QuantizedWeight(
            self.spec, master=master, rowwise=row, columnwise=column, size=self.size(), dtype=dtype or self.dtype,
            layer=self.layer,
        )  # fmt: skip
        new.whole_amax = None if self.whole_amax is None else run(self.whole_amax)
        new._cast = self._cast
        if view and self._seen != self._writes():
            new._seen = ()
        return new

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Sent]:
        """Quantizes this shard, in the directions that the pass needs, for FSDP2, which calls this."""
        from fxquant.weights.fsdp import send

        assert self.master is not None
        sent = send(self.master, OperandSpec.parse(self.spec), self.layer)
        return tuple(sent.shards), sent

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], sent: Sent, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight over the bytes that have arrived, with no copy; FSDP2 calls this."""
        from fxquant.compat.inside.fsdp import over
        from fxquant.weights.fsdp import gathered_parts, receive

        receive(sent)
        if out is not None:  # reads the same memory
            return None
        parts = gathered_parts(sent, self.layer)
        row, column = (parts[direction] for direction in Direction)
        whole = QuantizedWeight(
            str(sent.spec), rowwise=row, columnwise=column, size=sent.gather.size, dtype=param_dtype, layer=self.layer
        )
        if self.layer.amax is not None:
            whole.whole_amax = over(self.layer.amax, torch.float32, (1,), (1,))
        return whole, ()

    @classmethod
    @uncaptured  # torch 2.15 would capture it below an FSDP module compiled in place, which it skips
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        changed = [x for x in written(operator, args, kwargs) if isinstance(x, QuantizedWeight)]
        if changed:
            return _write(operator, args, kwargs, changed)
        if isinstance(first, QuantizedWeight):
            if operator is tensor_amax.target and first.whole_amax is not None:
                return first.whole_amax
            result = _wrapped(operator, first, args, kwargs)
            if result is not None:
                return result
        args, kwargs = tree_map_only(QuantizedWeight, QuantizedWeight.values, (tuple(args), dict(kwargs)))
        return operator(*args, **kwargs)


def _wrapped(operator: Any, weight: QuantizedWeight, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator that gives quantized weights; None of another."""
    if operator in _VIEWS or (operator in _SHAPED and _keeps_all(operator, weight, args, kwargs)):
        return weight.over(aten.alias.default if operator in _SHAPED else operator, view=True)
    if operator in _COPIES:
        weight.refresh()
        return weight.over(lambda tensor: operator(tensor, *args[1:], **kwargs))
    if operator is aten._to_copy.default:
        weight.refresh()
        return _cast(weight, kwargs)
    if operator is aten.empty_like.default and weight.is_stored and kwargs.get("dtype") in (None, weight.dtype):
        new = weight.over(lambda tensor: operator(tensor, device=kwargs.get("device"))).in_order()
        new._seen = ()
        return new
    if operator in _SHAPED and weight.master is not None:
        result = operator(weight.master, *args[1:], **kwargs)
        spec = str(plain_spec(OperandSpec.parse(weight.spec)))
        return tree_map_only(Tensor, lambda part: QuantizedWeight(spec, master=part, layer=weight.layer), result)
    return None


def _keeps_all(operator: Any, weight: QuantizedWeight, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True for a view that is the whole of a stored weight, as it lies."""
    if not weight.is_stored or operator in _NEW or operator is aten.split.Tensor:
        return False
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    view = operator(like, *args[1:], **kwargs)
    return (view.shape, view.stride(), view.storage_offset()) == (like.shape, like.stride(), 0)


def _cast(weight: QuantizedWeight, kwargs: Mapping[str, Any]) -> QuantizedWeight:
    """A copy in another dtype, on another device or in other memory; parts know no dtype."""
    others = {key: value for key, value in kwargs.items() if key != "dtype"}
    row, column = ([aten._to_copy(part, **others) for part in weight.parts(direction)] for direction in Direction)
    master = None if weight.master is None else aten._to_copy(weight.master, **kwargs)
    new = QuantizedWeight(
        weight.spec, master=master, rowwise=row, columnwise=column, size=weight.size(),
        dtype=kwargs.get("dtype") or weight.dtype, layer=weight.layer,
    )  # fmt: skip
    new.whole_amax = None if weight.whole_amax is None else aten._to_copy(weight.whole_amax, **others)
    if new.dtype != weight.dtype:
        new._seen = ()
    return new.in_order() if new.device != weight.device else new


def _write(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], changed: Sequence[QuantizedWeight]) -> Any:
    """Runs an operator that writes into weights: on their masters, or on their values where there are none."""
    if operator is aten.copy_.default and isinstance(args[1], QuantizedWeight) and changed[0] is args[0]:
        return _copy(args[0], args[1])
    for weight in changed:
        if weight.master is None and weight.requires_grad and operator not in _SET:
            raise RecipeError(
                f"{weight.layer.name}.weight has no master, so that every step of its training would be rounded to "
                f"{weight.spec}: freeze it (requires_grad_(False)), or store it with fxquant.quantize_parameters(.., "
                "masters=True)"
            )
    plain = {id(weight): weight.master if weight.master is not None else weight.values() for weight in changed}
    owners = {id(plain[id(weight)]): weight for weight in changed}

    def value(weight: QuantizedWeight) -> Tensor:
        return plain[id(weight)] if id(weight) in plain else weight.values()

    args, kwargs = tree_map_only(QuantizedWeight, value, (tuple(args), dict(kwargs)))
    result = operator(*args, **kwargs)
    for weight in changed:
        weight.layer.writes += 1
        if weight.master is None or not _is_real(weight.master):
            weight.quantize_again(plain[id(weight)])
    return tree_map_only(Tensor, lambda tensor: owners.get(id(tensor), tensor), result)


def _copy(weight: QuantizedWeight, source: QuantizedWeight) -> QuantizedWeight:
    """Writes one weight into another: parts of one format are copied as they are."""
    source.refresh()
    values, held = source.values(), [d for d in Direction if weight.parts(d)]
    if weight.master is not None:
        weight.master.copy_(values)
    weight.layer.writes += 1
    rounded = source.master is not None and weight.dtype != source.dtype
    wanted = OperandSpec.parse(weight.spec)
    if fits(source.spec, wanted) and held and not rounded and all(map(source.parts, held)):
        ordered = source.in_order(wanted)
        for direction in held:
            for part, new in zip(weight.parts(direction), ordered.parts(direction), strict=True):
                part.copy_(new)
        by_operators, of_itself, of_master = weight._writes()
        weight._seen = (by_operators, of_itself + 1, of_master)  # torch counts this write when it is done
        weight._cast = source._cast
    elif weight.master is None or not _is_real(weight.master):
        weight.quantize_again(values)
    return weight


def _is_real(tensor: Tensor) -> bool:
    """Returns True for a tensor with values: while graphs are made there are none."""
    return type(tensor) is Tensor and not tensor.is_meta


def fits(stored: str, wanted: OperandSpec) -> bool:
    """Returns True if products may take parts of the first spec where a recipe wants the second."""

    def sides(spec: OperandSpec) -> tuple[QuantSpec, QuantSpec, bool]:
        spec = plain_spec(spec)
        return parts_spec(spec.rowwise), parts_spec(spec.columnwise), spec.from_rowwise

    return sides(OperandSpec.parse(stored)) == sides(wanted)


def mismatch(layer: str, stored: str, wanted: OperandSpec) -> str:
    """The message for a recipe that does not fit what is stored."""
    name, stored = f"{layer}.weight" if layer else "a weight", str(plain_spec(OperandSpec.parse(stored)))
    return f"Recipe mismatch for {name}: stored as {stored}, recipe wants {wanted}"
