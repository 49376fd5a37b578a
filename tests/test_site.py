"""The site is built, strictly: a link to nothing, or a name without a docstring to show, fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return folder


def test_links_lead_to_pages_and_places(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html") if path.name != "404.html"}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            if link.startswith(("http", "data:", "mailto:")) or link == ".":
                continue
            if not file.exists() or (anchor and file in places and anchor not in places[file]):
                broken.append((path.name, link))
    assert not broken


def test_everything_is_there_offline(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(
            r"""<(?:script|img)[^>]+src=["'](https?:[^"']+)|<link[^>]+stylesheet[^>]+href=["'](https?:[^"']+)""", text
        )
        assert not loaded, (path.name, loaded)


def test_terms_lead_to_the_glossary(site: Path) -> None:
    assert 'href="glossary.html#rowwise-columnwise"' in (site / "concepts.html").read_text(encoding="utf-8")
    assert "fxquant.quantize_parameters" in (site / "api" / "weights.html").read_text(encoding="utf-8")
