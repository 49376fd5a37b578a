"""Bytes on paper beside those that two processes of FSDP2 send."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from weights.test_fsdp import Model, batch, counted, model, sharded

import fxquant
from fxquant.cost.sharding import Decoder, Mesh, traffic


def sent_in_a_step(recipe: str, keywords: dict[str, bool]) -> int:
    run = sharded(model(), recipe, **keywords)
    run(batch(0, 0)).sum().backward()  # the root is gathered once
    with counted() as sent:
        run(batch(0, 0)).sum().backward()
    return sum(count for _, count in sent)


def sizes_of(blocks: Model) -> Decoder:
    linears = sum(p.numel() for p in blocks.layers.parameters() if p.ndim == 2)
    others = sum(p.numel() for p in blocks.layers.parameters() if p.ndim == 1)
    return Decoder(linears=linears, other=others, blocks=2, hidden=64)


@pytest.mark.parametrize("kept", [False, True])
def test_gathers_of_two_ranks(ranks: Ranks, kept: bool) -> None:
    root = sum(p.numel() for p in model().embed.parameters()) * 4 // 2 * (1 if kept else 2)
    sent = ranks.run(sent_in_a_step, "mxfp8", {"reshard_after_forward": not kept})
    expected = traffic(sizes_of(model()), Mesh(2), 32, "mxfp8_e4m3", dtype=torch.float32, kept=kept)
    assert [count - root for count in sent] == [expected.weights] * 2


def test_what_formats_and_meshes_spare() -> None:
    sizes = Decoder(linears=1000, other=0, blocks=1, hidden=1)
    plain, mxfp8 = (traffic(sizes, Mesh(4), 0, weights).weights for weights in (None, "mxfp8_e4m3"))
    assert plain == 2 * 2 * 1000 * 3 / 4 and mxfp8 / plain == (1 + 1 / 32) / 2
    assert traffic(sizes, Mesh(1), 0).weights == 0
    assert traffic(sizes, Mesh(4, 2), 0).weights == plain / 2
    assert traffic(sizes, Mesh(1, 2), 10).activations == 10 * 8 * 2 / 2
    received = traffic(sizes, Mesh(1, 2), 10, activations="per_tensor_e4m3").activations
    assert received == 10 * 8 * 2 / 2 * 0.75, "1.5 GiB in the place of 2 on two H200s, docs/scaling.md"
    assert traffic(sizes, Mesh(1, 2), 10, activations="mxfp8_e4m3").activations == 10 * 8 * 2 / 2, "two payloads"
    assert fxquant.formats.FORMATS["nvfp4"].bytes_per_element < 0.6
