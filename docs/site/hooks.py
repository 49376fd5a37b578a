"""Makes pages of the site from files outside of docs/, and links the terms of the glossary: hooks of MkDocs.

README.md is the first page, CONTRIBUTING.md and CHANGELOG.md have pages too, and so has each script in docs/examples/.
Links between files of the repository become links between pages.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside of docs/, with their pages."""

LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])|(?<=src=\")([^\"]+)(?=\")")
NOT_PROSE = re.compile(
    r"^(```|~~~).*?^\1|^#.*?$|^:::.*?$|^\|.*?$|<!--.*?-->|`[^`\n]+`|!?\[[^\]]*\]\([^)]*\)|<[^>\n]+>", re.M | re.S
)
"""Parts of a page in which no term is linked: code, headings, tables, comments, links and tags."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from other files."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=moved(text, {"docs/": ""})))
    for script in sorted((ROOT / "docs" / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{script.stem}.md", content=example(script)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page and adds those to the glossary."""
    name = page.file.src_uri
    up = "../" * name.count("/")
    markdown = moved(markdown, {f"{up}../": up, "examples/": "examples/"})
    return markdown if name in ("glossary.md", "changelog.md") else linked(markdown, glossary(), f"{up}glossary.md")


def moved(text: str, folders: dict[str, str]) -> str:
    """Returns a text whose links to files of the repository lead to pages of the site."""

    def target(found: re.Match[str]) -> str:
        link = found[0]
        for folder, place in folders.items():
            if link.startswith(folder):
                link = place + link.removeprefix(folder)
        name = link.removeprefix("../")
        if name in OUTSIDE:
            link = OUTSIDE[name]
        return re.sub(r"^(examples/\w+)\.py$", r"\1.md", link)

    return LINK.sub(target, text)


def example(script: Path) -> str:
    """Returns the page of an example: the docstring of its script, then the script."""
    code = script.read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(code)) or script.stem).partition("\n")
    return f"# {title.rstrip('.:')}\n{text}\n\n`docs/examples/{script.name}`\n\n```python\n{code}```\n"


def glossary() -> dict[str, str]:
    """Returns the terms of the glossary with their anchors."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = {}
    for heading in re.findall(r"^### (.*)$", text, re.M):
        anchor = re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
        terms |= dict.fromkeys(heading.split(", "), anchor)
    return terms


def linked(text: str, terms: dict[str, str], page: str) -> str:
    """Returns a text with the first use of each term linked to the glossary."""
    of_anchor: dict[str, list[str]] = {}
    for term, anchor in terms.items():
        of_anchor.setdefault(anchor, []).append(term)
    for anchor, names in of_anchor.items():
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})(?:s|es)?\b")
        taken = [found.span() for found in NOT_PROSE.finditer(text)]
        for use in word.finditer(text):
            if not any(start < use.end() and use.start() < end for start, end in taken):
                text = f"{text[: use.start()]}[{use[0]}]({page}#{anchor}){text[use.end() :]}"
                break
    return text
