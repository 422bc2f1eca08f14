"""The package's page on an index: hatchling calls this hook when it builds, and a release knows its repository.

README's links and picture are relative, which an index does not follow. GitHub names the repository of a workflow in
``GITHUB_REPOSITORY``; a build elsewhere, without that variable, leaves the links as they are, and names no address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class IndexPage(MetadataHookInterface):
    """Metadata of the page: README with absolute links, and the addresses of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add readme and urls."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository, urls = os.environ.get("GITHUB_REPOSITORY"), {}
        if repository:
            home, tag = f"https://github.com/{repository}", f"v{metadata['version']}"
            text = with_absolute_links(text, repository, tag)
            urls = {"Repository": home, "Issues": f"{home}/issues", "Changelog": f"{home}/blob/{tag}/CHANGELOG.md"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a page of Markdown whose relative links and pictures lead to the files of a tag on GitHub."""
    raw, page = f"https://raw.githubusercontent.com/{repository}/{tag}/", f"https://github.com/{repository}/blob/{tag}/"

    def absolute(link: re.Match[str]) -> str:
        return f"{link[1]}{raw if link[1].startswith(('!', 'src')) else page}"

    return re.sub(r'(!\[[^\]]*\]\(|\]\(|src="|href=")(?![a-z]+:|#)', absolute, text)
