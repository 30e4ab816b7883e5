"""The built site, as a reader meets it: in a browser, without a network, wide and narrow, light and dark."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from bs4 import BeautifulSoup
from playwright.sync_api import Browser, Page, Route

PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 800}
RAW_MATHEMATICS = """() => {
  const article = document.querySelector('article').cloneNode(true);
  article.querySelectorAll('code, pre, script, style, mjx-container').forEach(node => node.remove());
  return article.textContent.match(/\\\\\\(|\\\\\\[|\\$\\$|\\\\begin\\{/g) || [];
}"""


class QuietHandler(SimpleHTTPRequestHandler):
    """Serve files and log nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass
class Visit:
    """What a browser met on one page."""

    errors: list[str] = field(default_factory=list)
    other_hosts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    formulas: int = 0
    rendered: int = 0
    raw: list[str] = field(default_factory=list)
    phone_width: int = 0


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the book from the committed outputs, away from the reader's own build, and return its folder."""
    output = tmp_path_factory.mktemp("site")
    program = Path(sys.executable).with_name("jupyter-book")
    command = [program, "build", "--all", "-W", "--keep-going", "-q", "--path-output", output, root]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return output / "_build" / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> list[str]:
    """The addresses of all pages, relative to the site."""
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on this machine alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport=LAPTOP)
    page.set_default_timeout(30_000)
    yield page
    page.close()


@pytest.fixture(scope="module")
def visits(browser: Browser, address: str, pages: list[str]) -> dict[str, Visit]:
    """Open every page once, let nothing through to another host, and note what happened."""
    return {name: _visit(browser, address, name) for name in pages if name not in ("index.html", "search.html")}


def _visit(browser: Browser, address: str, name: str) -> Visit:
    visit = Visit()

    def stay_here(route: Route) -> None:
        if route.request.url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            visit.other_hosts.append(route.request.url)
            route.abort()

    page = browser.new_page(viewport=LAPTOP)
    page.route("**/*", stay_here)
    page.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    page.on("response", lambda answer: visit.failed.append(answer.url) if answer.status >= 400 else None)
    page.on("requestfailed", lambda request: visit.failed.append(request.url))
    page.goto(address + name, wait_until="load")
    visit.formulas = page.locator(".math").count()
    if visit.formulas:
        page.wait_for_function("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
        page.evaluate("() => MathJax.startup.promise")
    visit.rendered = page.locator("mjx-container").count()
    if page.locator("mjx-merror").count():
        visit.raw += page.locator("mjx-merror").all_inner_texts()
    visit.raw += page.evaluate(RAW_MATHEMATICS)
    page.set_viewport_size(PHONE)
    visit.phone_width = page.evaluate("() => document.documentElement.scrollWidth")
    page.close()
    return visit


def test_no_page_has_an_error_in_the_console(visits: dict[str, Visit]) -> None:
    assert {name: visit.errors for name, visit in visits.items() if visit.errors} == {}


def test_no_page_asks_another_host_and_every_request_is_answered(visits: dict[str, Visit]) -> None:
    assert {name: visit.other_hosts for name, visit in visits.items() if visit.other_hosts} == {}
    assert {name: visit.failed for name, visit in visits.items() if visit.failed} == {}


def test_mathematics_is_rendered(visits: dict[str, Visit]) -> None:
    assert any(visit.formulas for visit in visits.values())
    unrendered = {name: (visit.formulas, visit.rendered) for name, visit in visits.items()}
    assert {name: seen for name, seen in unrendered.items() if seen[1] < seen[0]} == {}
    assert {name: visit.raw for name, visit in visits.items() if visit.raw} == {}


def test_no_page_is_wider_than_a_phone(visits: dict[str, Visit]) -> None:
    wide = {name: visit.phone_width for name, visit in visits.items() if visit.phone_width > PHONE["width"]}
    assert wide == {}


def test_the_site_opens_at_the_introduction(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_url("**/book/intro.html")
    assert page.locator("article h1").count() == 1


def test_search_finds_pinning(page: Page, address: str, chapter_paths: dict[str, Path]) -> None:
    page.goto(f"{address}search.html?q=pinning")
    page.wait_for_selector("#search-results ul.search li a")
    found = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.href)")
    assert not [link for link in found if not link.startswith(address)]
    assert any("/pinning.html" in link for link in found) or "pinning" not in chapter_paths


def test_the_carrier_explorer_follows_its_sliders(page: Page, address: str) -> None:
    page.goto(f"{address}book/carrier-explorer.html")
    words = page.locator("#explorer-figure .explorer-words")
    slider = page.locator("#explorer-figure input[name=length]")
    slider.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.explorer-words').textContent.includes('At length 544')")
    assert slider.is_visible()
    assert words.is_visible()
    assert page.locator("#explorer-figure svg").count() == 1


def test_dark_mode_is_dark_and_back(page: Page, address: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}book/intro.html")
    brightness = {}
    for _ in range(3):
        page.locator(".theme-switch-button").locator("visible=true").first.click()
        theme = page.evaluate("() => document.documentElement.dataset.theme")
        colours = [
            page.eval_on_selector(element, f"node => getComputedStyle(node).{style}")
            for element, style in (("body", "backgroundColor"), ("h1", "color"))
        ]
        brightness[theme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours]
    background, text = brightness["dark"]
    assert background < 60 < 160 < text
    background, text = brightness["light"]
    assert text < 110 < 220 < background


@cache
def _soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@cache
def _anchors(path: Path) -> set[str]:
    return {tag.get("id") or tag.get("name") for tag in _soup(path).select("[id], a[name]")}


def _broken(site: Path, page: str, link: str) -> bool:
    """Whether a link inside the site leads to no file, or to no anchor of its page."""
    target = urlsplit(urljoin(f"http://site/{page}", link))
    path = site / unquote(target.path).lstrip("/")
    if path.is_dir():
        path /= "index.html"
    if not path.is_file():
        return True
    return path.suffix == ".html" and bool(target.fragment) and unquote(target.fragment) not in _anchors(path)


def test_every_internal_link_anchor_and_image_resolves(site: Path, pages: list[str]) -> None:
    broken = []
    for page in pages:
        for tag in _soup(site / page).select("a[href], link[href], img[src], script[src], source[src], iframe[src]"):
            link = tag.get("href") or tag.get("src")
            outside = urlsplit(link).scheme in ("http", "https") or link.startswith("//")
            if outside and tag.name not in ("a", "link"):
                broken.append((page, f"{tag.name} from another host: {link}"))
            elif not outside and urlsplit(link).scheme not in ("mailto", "data") and link != "#":
                broken += [(page, link)] if _broken(site, page, link) else []
    assert broken == []


def test_every_image_says_what_it_shows(site: Path, pages: list[str]) -> None:
    silent = [
        (page, tag["src"][:80]) for page in pages for tag in _soup(site / page).select("img") if not tag.get("alt")
    ]
    assert silent == []
