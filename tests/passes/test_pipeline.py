"""The stages: every pass says why it stands there, and everything that decides a graph is in the cache key."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from fxquant import recipes
from fxquant.passes import pipeline
from fxquant.passes.pipeline import SPLIT, Lowering, Partition, Pass
from fxquant.passes.settings import Settings

NAMES = ("BOUND", "CALIBRATED", "CAPTURED", "EXPORTED", "JOINT", "LOWERED", "MEANING", "PACKAGED", "PROBED", "SPLIT")
STAGES: dict[str, tuple[Pass, ...]] = {name.lower(): getattr(pipeline, name) for name in NAMES}
PASSES = [(name, step) for name, stage in STAGES.items() for step in stage]


@pytest.mark.parametrize(("stage", "step"), PASSES, ids=[f"{stage}-{step.name}" for stage, step in PASSES])
def test_every_pass_says_why_it_stands_there(stage: str, step: Pass) -> None:
    assert len(step.because) > 20 and not step.because.endswith(".")


def test_no_name_lies_in_another() -> None:
    names = {step.name for _, step in PASSES}
    assert not [(a, b) for a in names for b in names if a != b and a in b], "torch disables passes by substring"
    for name in names:
        assert len({step.run for _, step in PASSES if step.name == name}) == 1, name


def test_the_order_of_the_last_stage() -> None:
    assert [step.name for step in SPLIT] == [
        "dispatch_payloads", "gather_payloads",
        "batch_amaxes", "advance_state", "split_scales", "reuse_attention_payload", "swizzle_scales", "mark_gemms",
        "pair_directions", "fuse_producers", "fuse_epilogues", "amax_before_views", "record_in_kernel", "read_kept",
        "few_rows", "name_products", "scale_at_once", "lower", "materialize_shared_inputs",
    ]  # fmt: skip


def test_a_way_in_is_a_stage() -> None:
    stages = {name for name, value in vars(pipeline).items() if isinstance(value, tuple) and isinstance(value[0], Pass)}
    assert stages == set(NAMES)
    for name in STAGES:
        assert f"\n{name}" in str(pipeline.__doc__)


def test_portable_stages_contain_no_training_passes() -> None:
    kept = [step for step in SPLIT if step.runs(Settings(portable=True))]
    assert [step.name for step in kept] == [
        "dispatch_payloads", "gather_payloads", "split_scales", "reuse_attention_payload", "swizzle_scales",
        "pair_directions", "amax_before_views", "few_rows", "lower", "materialize_shared_inputs",
    ]  # fmt: skip
    assert not any(step.training_only for step in kept)


def test_the_cache_key_tells_recipes_apart_and_equal_ones_agree() -> None:
    for kind in (Lowering, Partition):
        keys = {name: kind(Settings(recipe=recipe.fingerprint())).uuid() for name, recipe in recipes.RECIPES.items()}
        assert len(set(keys.values())) == len(keys)
        again = type(recipes.RECIPES["mxfp8"])().fingerprint()
        assert keys["mxfp8"] == kind(Settings(recipe=again)).uuid()


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_every_setting_is_in_the_cache_key(name: str) -> None:
    value = getattr(Settings(), name)
    other = replace(Settings(), **{name: not value if isinstance(value, bool) else f"{value} or another"})
    for kind in (Lowering, Partition):
        assert kind(other).uuid() != kind(Settings()).uuid()


def test_a_change_in_a_sub_folder_changes_the_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = set(pipeline.sources())
    for package in (pipeline, *(step.run for _, step in PASSES)):
        file = getattr(package, "__file__", None) or package.__code__.co_filename
        assert file in listed
    assert any("/kernels/cast/" in name for name in listed)
    keys = []
    for text in ("a = 1", "a = 2"):
        file = tmp_path / text / "passes" / "lower" / "state" / "file.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        monkeypatch.setattr(pipeline, "FOLDERS", (tmp_path / text,))
        assert pipeline.sources() == (str(file),)
        keys += [Lowering(Settings()).uuid(), Partition(Settings()).uuid()]
    assert len(set(keys)) == len(keys)
