"""The documentation site: its pages and tables here; built strictly and looked at in a browser where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:] = [str(ROOT), *sys.path]

from scripts import site_pages  # noqa: E402

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
DOCS_PYTHON = Path(os.environ.get("CTXEXT_DOCS", ROOT / ".venv" / "docs" / "bin" / "python"))


@pytest.mark.parametrize(
    ("origin", "uri", "link", "leads_to"),
    [
        ("README.md", "index.md", "docs/guides/models.md#encoders", "guides/models.md#encoders"),
        (
            "docs/guides/training.md",
            "guides/training.md",
            "../../recipes/finetune.py",
            "../source/recipes/finetune.py.md",
        ),
        ("docs/evidence/training.md", "evidence/training.md", "../guides/training.md#x", "../guides/training.md#x"),
        ("docs/guides/extending.md", "guides/extending.md", "../../CONTRIBUTING.md", "../contributing.md"),
        (
            "docs/guides/training.md",
            "guides/training.md",
            "../../recipes/configs",
            "../source/recipes/configs/index.md",
        ),
        ("docs/log.md", "log.md", "https://example.org/a#b", "https://example.org/a#b"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(origin: str, uri: str, link: str, leads_to: str) -> None:
    assert site_pages._with_site_links(f"[x]({link})", origin, uri) == f"[x]({leads_to})"


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert re.search(r"^  font: false$", CONFIG, re.MULTILINE)
    assert "unpkg" not in CONFIG
    assert not re.search(r"^extra_(css|javascript): .*//", CONFIG, re.MULTILINE)


@pytest.mark.nightly
def test_the_site_is_right_in_a_browser(tmp_path: Path) -> None:
    if not DOCS_PYTHON.is_file():
        pytest.skip(f"There is no {DOCS_PYTHON}: make docs installs what builds the site.")
    site = tmp_path / "site"
    build = [DOCS_PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    built = subprocess.run(build, cwd=ROOT, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    if not any(map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))):
        pytest.skip("There is no browser: install Chromium, and what it shows of the site is looked at too.")
    looked = subprocess.run(
        [DOCS_PYTHON, "scripts/site_check.py", site], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert looked.stdout.endswith("pages, nothing wrong\n")
