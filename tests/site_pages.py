"""Looks at pages of the site in Chromium, at widths of a phone and of a desk: what overflows, and what is cut."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
WIDTHS = (390, 1440)

# Each page is opened in a frame of that width, one after the other; the faults are sent back at the end.
_LOOK = r"""<!doctype html><body><iframe id="frame" height="900"></iframe><script>
const frame = document.getElementById("frame"), found = [];
const scrolls = (element) => ["auto", "scroll"].includes(frame.contentWindow.getComputedStyle(element).overflowX);
function look(page, width, theme) {
  const inner = frame.contentDocument, root = inner.scrollingElement;
  const tell = (what) => found.push(`${page} at ${width} px, ${theme}: ${what}`);
  if (root.scrollWidth > root.clientWidth + 1) tell(`the page is ${root.scrollWidth} px wide`);
  for (const pre of inner.querySelectorAll("article pre")) {
    const output = pre.closest(".cell_output, .highlight-text");
    const cut = pre.scrollWidth > pre.clientWidth + 1;
    if (cut && (!output || width > 1000)) tell(`code is cut: ${pre.innerText.slice(0, 60).replaceAll("\n", " ")}`);
  }
  for (const element of inner.querySelectorAll("article :is(p, pre, img, code, dt, li, h1, h2, h3, math)")) {
    const box = element.getBoundingClientRect();
    let parent = element;
    while (parent && !scrolls(parent)) parent = parent.parentElement;
    if (box.right > width + 1 && !parent) tell(`${element.tagName} ends at ${Math.round(box.right)} px`);
  }
  for (const image of inner.querySelectorAll("article img")) {
    const style = frame.contentWindow.getComputedStyle(image);
    if (style.display === "none") continue;
    if (!image.naturalWidth) tell(`no picture: ${image.src}`);
    const wide = image.clientWidth;
    if (image.src.endsWith(".svg") && wide < 400) tell(`a drawing ${wide} px wide: ${image.src}`);
    const dark = style.filter !== "none" || image.classList.contains("only-dark");
    if ((theme === "dark") !== dark) tell(`a picture that is not ${theme}: ${image.src}`);
  }
}
async function main() {
  for (const width of WIDTHS) for (const page of PAGES) {
    frame.width = width;
    await new Promise((ready) => { frame.onload = ready; frame.src = page; });
    for (const theme of ["light", "dark"]) {
      frame.contentDocument.body.dataset.theme = theme;
      for (const image of frame.contentDocument.images) image.loading = "eager";
      look(page, width, theme);
    }
  }
  await fetch("found", { method: "POST", body: JSON.stringify(found) });
}
main().catch((error) => fetch("found", { method: "POST", body: JSON.stringify([`${frame.src}: ${error}`]) }));
</script></body>"""


def faults(site: Path, pages: Sequence[str], widths: Sequence[int] = WIDTHS, timeout: float = 500) -> list[str]:
    """What overflows or is cut on the pages of a site, each with its width and theme."""
    script = _LOOK.replace("WIDTHS", json.dumps(list(widths)))
    answers: Queue[str] = Queue()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (Path(folder) / "site").symlink_to(site.resolve(), target_is_directory=True)
        script = script.replace("PAGES", json.dumps([f"site/{page}" for page in pages]))
        (Path(folder) / "look.html").write_text(script, encoding="utf-8")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Answering, answers, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        command = [CHROMIUM, *options, f"--user-data-dir={folder}/profile"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen([*command, f"http://127.0.0.1:{server.server_port}/look.html"], **quiet)
        try:
            return json.loads(answers.get(timeout=timeout))
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            server.server_close()


class _Answering(SimpleHTTPRequestHandler):
    def __init__(self, answers: Queue[str], *args: Any, **settings: Any):
        self.answers = answers
        super().__init__(*args, **settings)

    def do_POST(self) -> None:
        """Take what was found."""
        self.answers.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def pages_of(site: Path) -> list[str]:
    """All pages of a site but those of sources."""
    found = (path.relative_to(site) for path in site.rglob("*.html"))
    return sorted(str(path) for path in found if path.parts[0] != "_modules")


def build(root: Path, folder: Path) -> Path:
    """Build the site from a copy, as the reference is written beside the guides; return where it is."""
    copy, site = folder / "copy", folder / "site"
    copy.mkdir()
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(root / name, copy)
    for name in ("docs", "notebooks", "tests"):  # pages link to files of the tests
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("reference", "__pycache__"))
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(copy / "docs"), str(copy), str(site)]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-m", "sphinx", *options], check=True, env=os.environ | {"PYTHONPATH": paths})
    return site


def main(site: Path) -> None:
    """Print the faults of all pages of a site."""
    for fault in faults(site, pages_of(site)):
        print(fault)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
