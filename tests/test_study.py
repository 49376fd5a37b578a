"""The study of docs/study: its recipes, its table, and the page that they are put in."""

from __future__ import annotations

from pathlib import Path

from test_docs import ROOT, tables

from fxquant import factories, recipes

study = tables.load(ROOT / "docs" / "study" / "study.py")


def test_all_recipes_that_train_are_in_it() -> None:
    names = list(study.all_recipes(4))
    assert set(recipes.RECIPES) - set(names) == {"weight_only_fp8", "weight_only_nvfp4"}
    assert {f"factories.{name}" for name in factories.PAPERS} < set(names)


def test_gaps_are_those_of_equal_seeds(tmp_path: Path) -> None:
    size = study.CPU[0]
    finals = {"high_precision": (2.0, 2.2), "mxfp8": (2.1, 2.4)}
    results = [
        {"size": size.name, "recipe": name, "seed": seed, "final": final, "coverage": 1.0, "error_fprop": 0.03,
         "error_dgrad": 0.04, "error_wgrad": 0.05, "zeros_input": 0.01, "zeros_weight": 0.0,
         "zeros_grad_output": 0.5, "made": "here"}
        for name, of_seeds in finals.items() for seed, final in enumerate(of_seeds)
    ]  # fmt: skip
    (tmp_path / "README.md").write_text("before\n<!-- results: cpu -->\n<!-- end -->\nafter\n")
    for _ in range(2):
        study.write_page(results, study.CPU, "cpu", tmp_path)
    text = (tmp_path / "README.md").read_text()
    numbers = "2.250 | +0.150 ± 0.050 | 2 | 100% | 3.00% | 4.00% | 5.00% | 1.0% | 0.0% | 50.0%"
    assert f"| mxfp8 | {numbers} |" in text and text.count("mxfp8") == 1
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| high_precision | 2.100 |  | 2 | 100% |" in text
