"""Hooks of mkdocs: the site's first page is README.md, and pages beside docs/ are part of the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")}}
"""Page beside docs/ → its name in the site."""
OTHERS = r"\[([^]]*)\]\((pyproject\.toml|LICENSE|SECURITY\.md)\)"
"""Links to files that are not part of the site: only their text is shown."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/, with links as they are seen from docs/. README begins with its purpose and its tasks."""
    for name, target in BESIDE.items():
        text = (ROOT / name).read_text()
        if name == "README.md":
            title, purpose, rest = text.split("\n\n", 2)
            before, tasks, after = re.split(r"^(?=## Tasks|## More)", rest, flags=re.M)
            text = "\n\n".join([title, purpose, tasks, before, after])
        text = re.sub(OTHERS, r"\1", text).replace("](docs/", "](").replace('src="docs/', 'src="')
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A comment ends with an empty line, else the table after it is none; links to pages beside docs/ stay in the site."""
    markdown = re.sub(r"^(<!-- .* -->)$", r"\n\1\n", markdown, flags=re.M)
    return re.sub(rf"\]\((?:\.\./)+({'|'.join(BESIDE)})", r"](\1", markdown) if "/" not in page.file.src_uri else markdown
