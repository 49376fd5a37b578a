"""The random bits of stochastic rounding: the generator's published answers, and what a place and a step change."""

from __future__ import annotations

import pytest
import torch

from fxquant.kernels.cast import philox

WORDS = 0xFFFFFFFF
# known answers of Random123 (kat_vectors, philox4x32, 10 rounds): counter, key, result
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORDS,) * 4, (WORDS,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    keys = philox.round_keys(tuple(torch.tensor(word) for word in key))
    words = philox.philox4x32(tuple(torch.tensor([word]) for word in counter), keys)
    assert tuple(int(word) for word in words) == expected


def test_bytes_are_the_words_of_their_place() -> None:
    """Byte j of a block of 16 is byte j % 4 of word j // 4 at (block, row, 2 number + stream, step)."""
    seed, step = 0x123456789ABCDEF0, 7
    bytes = philox.random_bytes(torch.Size((2, 3, 32)), torch.tensor([seed, step, 2]), 1)
    keys = philox.round_keys((torch.tensor(seed & WORDS), torch.tensor(seed >> 32)))
    for batch, row, block in ((0, 0, 0), (0, 2, 1), (1, 1, 1)):
        words = philox.philox4x32((torch.tensor([block]), 3 * batch + row, 2 * 2 + 1, step), keys)
        expected = b"".join(int(word).to_bytes(4, "little") for word in words)
        assert bytes[batch, row, 16 * block : 16 * block + 16].tolist() == list(expected)


def test_every_byte_is_equally_likely_and_every_argument_counts() -> None:
    shape, n = torch.Size((128, 512)), 128 * 512
    made = [
        philox.random_bytes(shape, torch.tensor(state), stream)
        for state, stream in (
            ([1, 1, 0], 0),
            ([1, 2, 0], 0),
            ([2, 1, 0], 0),
            ([1 + (1 << 32), 1, 0], 0),
            ([1, 1, 0], 1),
            ([1, 1, 1], 0),
        )
    ]
    for bytes in made:
        counts = torch.bincount(bytes.flatten(), minlength=256).double()
        chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
        assert 170 < chi2 < 360  # 255 degrees of freedom: five standard deviations
        for axis in (0, 1):
            pair = torch.stack((bytes.flatten(), bytes.roll(1, axis).flatten())).double()
            assert torch.corrcoef(pair)[0, 1].abs() < 5 / n**0.5
    for i, a in enumerate(made):
        for b in made[:i]:
            assert (a == b).double().mean() < 0.006  # 1/256 by chance


def test_negative_seeds_are_64_bits_too() -> None:
    bytes = philox.random_bytes(torch.Size((4, 16)), torch.tensor([-1, 0, 0]), 0)
    assert bytes.min() >= 0 and bytes.max() < 256
