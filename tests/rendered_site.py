"""Is every page of the site whole, at a desk's width and at a phone's? Chromium renders docs/_build/html, which `make docs` has built.

An element is cut off if it reaches beyond its page's column, and neither it nor what it stands in has a scroll bar. A table or a block
of code that has to be scrolled at a desk's width is cut off, too: nobody sees the bar below forty rows. Exit code 1 if there is one; it
is named with its page and its width. `--picture DIR` also writes a picture of every page.
"""

from __future__ import annotations

import argparse
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DESK, PHONE = 1280, 400  # pixels
HEIGHT = 900
# Chromium that fetches nothing by itself. A page is loaded when all its frames are.
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars", "--timeout=240000"]
MEASURE = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, view = frame.contentWindow, width = frame.clientWidth;
  const scrolls = e => e && e !== page.body && (/auto|scroll/.test(view.getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const column = page.querySelector("article") || page.body, end = Math.min(width, column.getBoundingClientRect().right) + 1;
  const right = e => e.getBoundingClientRect().right - parseFloat(view.getComputedStyle(e).paddingRight);
  const seen = e => e.getClientRects().length && view.getComputedStyle(e).position !== "absolute";
  const cut = [...column.querySelectorAll("*")].filter(e => seen(e) && right(e) > end && !scrolls(e));
  const boxes = width < DESK ? [] : [...column.querySelectorAll(".table-wrapper, pre")];
  const bars = boxes.filter(e => seen(e) && e.scrollWidth > e.clientWidth + 1);
  const told = e => ({page: frame.title, width, tag: e.tagName, right: Math.round(right(e)), end: Math.round(end),
    text: e.textContent.trim().replace(/\\s+/g, " ").slice(0, 60)});
  found.push({page: frame.title, width, elements: column.querySelectorAll("*").length, cut: [...cut, ...bars].map(told)});
}
document.body.replaceChildren(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        return None


def rendered(site: Path, widths: tuple[int, ...] = (DESK, PHONE)) -> list[dict[str, Any]]:
    """For each page and width: how many elements it has, and which are cut off."""
    pages = sorted(path.name for path in site.glob("*.html"))
    frames = "".join(
        f'<iframe title="{page}" src="{page}" style="width:{width}px;height:{HEIGHT}px;border:0"></iframe>'
        for page in pages
        for width in widths
    )
    with tempfile.TemporaryDirectory() as place:
        served = Path(place, "site")
        shutil.copytree(site, served)
        all_pages = (
            f'<!doctype html><body>{frames}<script>addEventListener("load", () => {{const DESK = {DESK}; {MEASURE}}})</script></body>'
        )
        (served / "all-pages.html").write_text(all_pages)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/all-pages.html"
            shown = browser("--dump-dom", address, place=place)
        finally:
            server.shutdown()
    text = re.search(r'<pre id="found">(.*?)</pre>', shown, re.S)
    if text is None:
        raise SystemExit(f"Chromium has not measured the pages: {shown[:500]}")
    found: list[dict[str, Any]] = json.loads(html.unescape(text[1]))
    if len(found) != len(pages) * len(widths) or not all(each["elements"] for each in found):
        raise SystemExit(f"Chromium has not rendered all pages: {[(each['page'], each['elements']) for each in found]}")
    return found


def browser(*arguments: str, place: str) -> str:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("There is no Chromium: `apt-get install chromium`, or your system's package")
    done = subprocess.run([program, *QUIET, f"--user-data-dir={place}/profile", *arguments], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / "docs" / "_build" / "html", help="default: docs/_build/html")
    parser.add_argument("--picture", type=Path, metavar="DIR", help="write a picture of the top of every page at every width")
    arguments = parser.parse_args()
    found = rendered(arguments.site)
    for page in found if arguments.picture else ():
        with tempfile.TemporaryDirectory() as place:
            arguments.picture.mkdir(parents=True, exist_ok=True)
            to = arguments.picture / f"{Path(page['page']).stem}-{page['width']}.png"
            window = f"--window-size={page['width']},{HEIGHT}"
            browser(window, f"--screenshot={to}", (arguments.site / page["page"]).resolve().as_uri(), place=place)
    cut = [element for page in found for element in page["cut"]]
    for each in cut:
        print(f"{each['page']} at {each['width']}: {each['tag'].lower()} ends at {each['right']} of {each['end']}: {each['text']}")
    print(f"{len(found)} pages rendered, {sum(page['elements'] for page in found)} elements, {len(cut)} of them cut off")
    raise SystemExit(1 if cut else 0)


if __name__ == "__main__":
    main()
