"""The tiles of `fxquant.kernels.linear.gluon_blocks`: their sizes, registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_SHARED = 232_448 - 256
"""Bytes of shared memory of a program beside its barriers."""
_AS_FAST = 1.08
"""How much as many rows take in tiles of 256 rows, with one in tiles of 192; where `b` has scales of tiles."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tiles of a product. Shared memory and registers hold one program a multiprocessor."""

    groups: int = 2
    height: int = 64
    columns: int = 128
    deep: bool = False
    """Products of two blocks along K are begun together: with two groups of 64 rows, scales of tiles, whole rows."""
    band: int = 8
    c_tiles: int = 1
    """Tiles of 64 rows of the result that a group has in shared memory, where its elements have two bytes."""

    @classmethod
    def of(cls, sizes: tuple[int, int], processors: int, *, tiled: bool) -> Config:
        """Returns the tiles for a result of these sizes, by the scales of `b`: those with the fewest rows in turn."""
        wide, high = cls(height=128, c_tiles=2), cls(groups=3)
        if not tiled:
            return wide
        return high if high._turns(sizes, processors) < _AS_FAST * wide._turns(sizes, processors) else wide

    @classmethod
    def of_groups(cls, rows: int, *, tiled: bool) -> Config:
        """Returns the tiles for so many rows of a group on average."""
        return cls(deep=True) if tiled and rows < 256 else cls(height=128, c_tiles=2)

    def _turns(self, sizes: tuple[int, int], processors: int) -> int:
        """Returns the rows of tiles that the busiest of so many multiprocessors has."""
        tiles = -(-sizes[0] // self.rows) * -(-sizes[1] // self.columns)
        return -(-tiles // processors) * self.rows

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return self.groups * self.height

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies; one that loads has 24, a multiprocessor 65536, given out by eights."""
        return 240 if self.groups == 2 else 160

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the constants of the kernel for results of a dtype."""
        return {
            "DEEP": self.deep, "BAND": self.band, "GROUPS": self.groups, "REGISTERS": self.registers,
            "STAGES": self.stages(dtype.itemsize), "HEIGHT": self.height, "BN": self.columns,
            "C_TILES": self._c_tiles(dtype.itemsize),
        }  # fmt: skip

    def _c_tiles(self, item: int) -> int:
        return self.c_tiles if item == 2 else 1

    def stages(self, item: int) -> int:
        """Returns the number of tiles of both operands beside those of the result with so many bytes an element."""
        result = self.groups * self._c_tiles(item) * 64 * self.columns * item
        return (_SHARED - result) // (132 * (self.rows + self.columns))
