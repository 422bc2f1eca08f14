"""What the documentation site (mkdocs.yml) shows beyond the pages of docs/.

Four things, for which mkdocs calls the functions here (its hooks):

* README.md is the site's first page; CONTRIBUTING.md, CHANGELOG.md and examples/README.md are pages, too.
* A link that leaves docs/ leads to a page that shows the file, or what the folder holds. Such pages are not searched.
* Some pages come first or last among what the search finds.
* Formulas become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {"examples/README.md": "examples.md"}
BOOSTS = {"guides/howto/": 3, "guides/methods.md": 3, "quickstart.md": 2, "guides/coming-from.md": 0.5, "log.md": 0.5}
BOOSTS |= {"changelog.md": 0.5, "guides/published-configs.md": 0.5, "evidence/": 0.5}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".json": "json", ".toml": "toml"}
FENCED = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
BLOCK = re.compile(r"^<!-- /?[\w./-]+ -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and one for each file outside docs/ that a page links to."""
    from mkdocs.structure.files import File  # of an environment of its own: the tests read this file without it

    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    shown: set[str] = set()
    for origin, text in texts.items():
        for part in FENCED.split(text)[::2]:
            shown |= {_target(origin, link[2]) for link in LINK.finditer(part) if "://" not in link[2]}
    shown |= {f"{name}/{path.name}" for name in shown if _is_folder(name) for path in (ROOT / name).iterdir()}
    for name in PAGES:
        files.append(File.generated(config, PAGES[name], content=texts[name]))
    for name in sorted(shown):
        if not name.startswith(("docs/", "..")) and name not in PAGES and (ROOT / name).exists():
            files.append(File.generated(config, _source_page(name), content=HIDDEN + _shown(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site, and the search to pages of the first steps before others."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    page.meta["search"] = {"boost": next((by for at, by in BOOSTS.items() if uri.startswith(at)), 1)}
    origin = {place: name for name, place in PAGES.items()}.get(uri, f"docs/{uri}")
    parts = FENCED.split(BLOCK.sub("", markdown))
    parts[::2] = [_with_site_links(part, origin, uri) for part in parts[::2]]
    return "".join(parts)


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML."""
    from latex2mathml.converter import convert

    def drawn(formula: re.Match[str]) -> str:
        alone = formula[1] == "div"
        math = convert(html.unescape(formula[2]).strip(), display="block" if alone else "inline")
        return f'<div class="formula">{math}</div>' if alone else math

    return FORMULA.sub(drawn, content)


def _with_site_links(text: str, origin: str, uri: str) -> str:
    def moved(link: re.Match[str]) -> str:
        if "://" in link[2] or link[2].startswith("mailto:"):
            return link[0]
        target = _target(origin, link[2])
        place = _place(target)
        return f"{link[1]}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{link[3] or ''}{link[4]}"

    return LINK.sub(moved, text)


def _place(target: str) -> str:
    """Return where the site has a file of the repository."""
    if target.startswith("docs/"):
        inside = target.removeprefix("docs/")
        return f"{inside}/README.md" if _is_folder(target) else inside
    return PAGES.get(target) or _source_page(target)


def _target(origin: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _is_folder(name: str) -> bool:
    return not name.startswith(("docs", "..")) and (ROOT / name).is_dir()


def _source_page(name: str) -> str:
    return f"source/{name}/index.md" if _is_folder(name) else f"source/{name}.md"


def _shown(name: str) -> str:
    path = ROOT / name
    if path.is_dir():
        inside = sorted(entry for entry in path.iterdir() if not entry.name.startswith(("_", ".")))
        lines = [f"* [{entry.name}]({entry.name}.md)" for entry in inside if entry.is_file()]
        return f"# {name}/\n\n" + "\n".join(lines) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return f"# {name}\n\n````markdown\n{text}\n````\n"
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
