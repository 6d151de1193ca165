"""Look at the built site with a browser: `python docs/check_site.py [--every N] [--shots FOLDER]` after `make docs`.

Chromium is driven through chromedriver's own protocol (Debian's packages `chromium` and `chromium-driver`, no Python
package). On every page, or every Nth of the generated ones: no error on the console, no request to another host,
nothing wider than the screen, formulas set, figures drawn, the stepper steps by key and finds what it expects. On a few
pages: contrast in both colour schemes, a narrow screen, a vector from a file, and what the search answers. Internal
links and their targets are read from the files. Exit code 1 with a line for each thing that is wrong.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "_build" / "html"
GENERATED = ("vectors", "faults", "clauses", "api")
WIDE, NARROW = (1280, 900), (390, 844)
SHOWN = ("index", "10_packed", "50_delta", "96_crosswalk", "97_onnx", "clauses/PACK-6", "compatibility",
         "vectors/trace-life-of-four-requests", "vectors/gdn-update-story-from-slots")  # fmt: skip
ANSWERS = {
    "newest column": "20_conv", "skip cached tokens": "86_drafts 85 84_requests clauses/SNAP-2 92_failures",
    "negative slot padding": "30_pools clauses/PAD-1 clauses/SLOT-2", "PACK-6": "clauses/PACK-6 92_failures",
    "adapter ten minutes": "91_adopt",
}  # fmt: skip
"""What a newcomer types, and the pages of which one has to be among the results."""

SCRIPT = Path(__file__).with_suffix(".js").read_text("utf-8")


class Links(HTMLParser):
    """Targets and names of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for key, value in attributes:
            if key in ("id", "name") and value:
                self.names.add(value)
            if key in ("href", "src") and value:
                self.links.append(value)


def broken_links(site: Path) -> Iterator[str]:
    """Internal links of all pages whose file or fragment is not there."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.relative_to(site).as_posix()] = found = Links()
        found.feed(path.read_text("utf-8"))
    for page, found in pages.items():
        for link in found.links:
            if link.startswith(("http://", "https://", "data:", "mailto:")):
                continue
            target, fragment = urldefrag(urljoin(f"/{page}", unquote(link)))
            name = target.lstrip("/").partition("?")[0]
            if not (site / name).is_file():
                yield f"{page}: {link} is not there"
            elif fragment and name in pages and fragment not in pages[name].names:
                yield f"{page}: {link} has no such place"


class Quiet(SimpleHTTPRequestHandler):
    """The site on this machine, without a log; browsers ask for an icon that it does not have."""

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()


class Browser:
    """One headless Chromium, spoken to through chromedriver."""

    def __init__(self) -> None:
        driver = shutil.which("chromedriver")
        if driver is None:
            sys.exit("chromedriver is needed: Debian's packages chromium and chromium-driver")
        self.profile = tempfile.mkdtemp()
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=quiet, text=True)
        assert self.process.stdout
        line = next(line for line in self.process.stdout if "successfully" in line)
        self.base = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
        flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run hide-scrollbars disable-sync " \
                "disable-background-networking disable-component-update"
        words = [f"--{flag}" for flag in flags.split()]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={self.profile}"]
        asked = {"goog:chromeOptions": {"args": words}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self.base += f"/session/{session['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def ask(self, name: str, *arguments: Any) -> Any:
        """What one of the functions of check_site.js finds wrong."""
        return self.run(f"{SCRIPT}\nreturn {name}(...arguments);", *arguments)

    def open(self, address: str, size: tuple[int, int] = WIDE) -> list[str]:
        """Load a page and wait for its formulas; what the console said in error."""
        self.call("POST", "/window/rect", {"width": size[0], "height": size[1]})
        self.call("POST", "/url", {"url": address})
        formulas = "(window.MathJax?.startup?.promise || Promise.resolve()).then(() => arguments[0]());"
        self.call("POST", "/execute/async", {"args": [], "script": formulas})
        said = self.call("POST", "/se/log", {"type": "browser"})
        return [f"console: {entry['message'][:200]}" for entry in said if entry["level"] == "SEVERE"]

    def shot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def close(self) -> None:
        self.call("DELETE", "")
        self.process.terminate()
        shutil.rmtree(self.profile, ignore_errors=True)


def pages_of(site: Path, every: int) -> list[str]:
    """Pages to open: all that Sphinx made, and every Nth of the generated ones."""
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    generated = [name for name in names if name.startswith(GENERATED)]
    return [name for name in names if name not in set(generated)] + generated[::every]


def look(browser: Browser, host: str, every: int, shots: Path | None) -> Iterator[str]:
    """A line for each thing that is wrong."""
    pages = pages_of(SITE, every)
    for n, page in enumerate(pages):
        print(f"\r{n + 1} of {len(pages)}", end="", file=sys.stderr)
        found = browser.open(f"{host}/{page}") + browser.ask("look") + browser.ask("step")
        yield from (f"{page}: {one}" for one in found)
    print(file=sys.stderr)
    for page in SHOWN:
        for theme in ("light", "dark"):
            browser.open(f"{host}/{page}.html")
            yield from (f"{page}: {one}" for one in browser.ask("contrast", theme))
            if shots:
                browser.shot(shots / f"{page.replace('/', '-')}-{theme}.png")
        browser.open(f"{host}/{page}.html", NARROW)
        yield from (f"{page}, narrow: {one}" for one in browser.ask("look"))
        if shots:
            browser.shot(shots / f"{page.replace('/', '-')}-narrow.png")
    yield from step_through_file(browser, host)
    for words, answers in ANSWERS.items():
        got = searched(browser, f"{host}/search.html?q={words.replace(' ', '+')}")
        if not any(answer in link for answer in answers.split() for link in got):
            yield f"search for {words!r} does not lead to one of {answers}: {got[:5]}"


def step_through_file(browser: Browser, host: str) -> Iterator[str]:
    """The page that takes a file, with a vector of the suite and with a file that is none."""
    browser.open(f"{host}/stepper.html")
    (field,) = browser.call("POST", "/elements", {"using": "css selector", "value": "input.stepper-file"})
    vector = ROOT / "goldens" / "vectors" / "step" / "trace-life-of-four-requests.json"
    for path, wanted in ((vector, "frames"), (ROOT / "pyproject.toml", "cannot be stepped through")):
        browser.call("POST", f"/element/{next(iter(field.values()))}/value", {"text": str(path)})
        time.sleep(0.5)
        state = browser.run("const s = document.getElementById('chosen');"
                            "return s.textContent + (s.dataset.frames > 1 && s.dataset.wrong === '0' ? ' frames' : '')")
        if wanted not in state:
            yield f"stepper.html: {path.name} gives {state[:80]!r}"


def searched(browser: Browser, address: str) -> list[str]:
    """Where the results of a search lead."""
    browser.open(address)
    links: list[str] = []
    for _ in range(40):
        links = browser.run("return [...document.querySelectorAll('ul.search a')].map((a) => a.getAttribute('href'))")
        if links and "searching" not in browser.run("return document.title.toLowerCase()"):
            break
        time.sleep(0.25)
    return links[:20]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--every", type=int, default=1, help="open every Nth of the generated pages")
    words.add_argument("--shots", type=Path, help="a folder for screenshots")
    given = words.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser()
    try:
        host = f"http://127.0.0.1:{server.server_port}"
        wrong = [*broken_links(SITE), *look(browser, host, given.every, given.shots)]
    finally:
        browser.close()
        server.shutdown()
    print("\n".join(wrong) or f"{len(pages_of(SITE, given.every))} pages: nothing wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
