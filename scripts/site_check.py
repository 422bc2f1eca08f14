"""Look at the built site in a headless Chromium, and print what is wrong with it, a line each.

    .venv/docs/bin/python scripts/site_check.py site

Every page is opened at 1280 and at 400 pixels, in light and in dark colours: no error in the console, no request that
fails or leaves for another host, no horizontal scroll, no picture without a light card in dark colours. The search must
find "yarn".
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
WIDTHS = (1280, 400)
COLOURS = {"light": "default", "dark": "slate"}
DARK_PICTURES = """() => [...document.querySelectorAll("article img")].filter(picture =>
    !getComputedStyle(picture).backgroundColor.startsWith("rgb(255")).map(picture => picture.src)"""
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Server of files that writes no log."""

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on a free port."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def watch(page: Page, wrong: list[str], where: str, address: str) -> None:
    """Note every error and every request that fails or leaves for another host."""
    page.on("console", lambda said: wrong.append(f"{where}: console: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"{where}: {error}"))
    # What was still being loaded when the next page was opened is no failure.
    failed = lambda asked: asked.failure == "net::ERR_ABORTED" or wrong.append(f"{where}: {asked.url} {asked.failure}")  # noqa: E731
    page.on("requestfailed", failed)
    inside = (address, "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(inside) else wrong.append(f"{where}: {asked.url}"))


def look(browser: Browser, address: str, names: list[str], screenshots: Path | None) -> list[str]:
    """Return what is wrong with each page at each width, in each colour."""
    wrong: list[str] = []
    for width in WIDTHS:
        for colours in COLOURS:
            where = f"{width} {colours}"
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=colours)
            watch(page, wrong, where, address)
            for name in names:
                page.goto(f"{address}/{name}")
                if page.get_attribute("body", "data-md-color-scheme") != COLOURS[colours]:
                    wrong.append(f"{where} {name}: in other colours")
                if (more := page.evaluate(TOO_WIDE)) > 0:
                    wrong.append(f"{where} {name}: {more} pixels too wide")
                wrong += [f"{where} {name}: no card behind {picture}" for picture in page.evaluate(DARK_PICTURES)]
                if screenshots:
                    page.screenshot(path=screenshots / f"{name.replace('/', '-')}-{width}-{colours}.png")
            page.close()
    return wrong


def search(browser: Browser, address: str, screenshots: Path | None) -> list[str]:
    """Return what is wrong with a search for "yarn" on the first page."""
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    watch(page, wrong, "search", address)
    page.goto(f"{address}/index.html")
    page.keyboard.press("/")
    page.keyboard.type("yarn", delay=50)
    result = page.locator(".md-search-result__item a").first
    result.wait_for(timeout=20_000)
    if "yarn" not in page.locator(".md-search-result__list").inner_text().lower():
        wrong.append("search: no result names yarn")
    if screenshots:
        page.screenshot(path=screenshots / "search.png")
    page.close()
    return wrong


def main() -> None:
    """Look at the site whose folder is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="folder to write a picture of each page to")
    parser.add_argument("--only", nargs="*", help="pages; default all but those that show source files")
    given = parser.parse_args()
    site = given.site.resolve()
    names = given.only or [
        path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if "source" not in path.parts
    ]
    if given.screenshots:
        given.screenshots.mkdir(parents=True, exist_ok=True)
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_playwright() as playwright, served(site) as address:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        wrong = look(browser, address, names, given.screenshots)
        wrong += search(browser, address, given.screenshots)
        browser.close()
    print("\n".join(wrong) or f"{len(names)} pages, nothing wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
