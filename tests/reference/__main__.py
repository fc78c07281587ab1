"""`python tests/reference build/docs`: the public API, the README and the notebooks as a static site."""

import json
import sys
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pdoc import render
from pdoc.doc import Doc, Module
from pdoc.render_helpers import lexer, to_html
from pygments import highlight
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[2]

PAGES = ["functional_jd"] + [f"functional_jd.{page}" for page in ("random", "distributed", "plotting", "testing")]

# The sections of the first page, and the packages or files that their names come from.
SECTIONS = {
    "Train": ["training", "engines.choose"],
    "Objectives": ["objectives"],
    "Differentiate": ["engines", "core.slow_path"],
    "Aggregate": ["aggregation", "core.types"],
    "Rules": ["aggregators"],
    "Loss scaling": ["precision.loss_scale", "precision.scale_state", "precision.grad_scaler"],
    "Precision": ["precision"],
    "Optimizers": ["optimizers"],
    "Diagnose": ["diagnostics", "core.names"],
    "More pages": ["random"],
}


def build(site: Path) -> None:
    """Write the site into a folder."""
    render.configure(docformat="google", include_undocumented=False, template_directory=Path(__file__).parent)
    modules = {page: Module(import_module(page)) for page in PAGES}
    render.env.globals |= {"sections": sections, "notebooks": titles()}
    for page, module in modules.items():
        write(site / f"{page.replace('.', '/')}.html", render.html_module(module, modules))
    front = render.env.get_template("text.html.jinja2").render
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace(".ipynb)", ".html)")
    write(site / "index.html", front(all_modules=modules, title="functional_jd", text=to_html(readme), up=""))
    for path, title in titles().items():
        text = "\n".join(cells(ROOT / "notebooks" / f"{path}.ipynb"))
        write(site / "notebooks" / f"{path}.html", front(all_modules=modules, title=title, text=text, up="../"))
    for picture in (ROOT / "notebooks").glob("*.png"):
        (site / "notebooks" / picture.name).write_bytes(picture.read_bytes())
    write(site / "search.js", render.search_index(modules))


def sections(module: Module) -> dict[str, list[Doc[Any]]]:
    """The members of a page in the order to read them in, under their headings."""
    members = sorted(module.own_members, key=lambda member: member.kind == "class")  # functions first, then records
    if module.fullname != PAGES[0]:
        return {"": members}
    found: dict[str, list[Doc[Any]]] = {title: [] for title in SECTIONS}
    home = {file: title for title, files in SECTIONS.items() for file in files}
    for member in members:
        module_name = member.obj.__name__ if isinstance(member, Module) else member.obj.__module__
        path = module_name.removeprefix("functional_jd.")
        while path not in home:
            path = path.rpartition(".")[0]
        found[home[path]].append(member)
    return found


def titles() -> dict[str, str]:
    """The notebooks: the name of each without its ending, and its first heading."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    first = {path.stem: "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]) for path in paths}
    return {stem: source.splitlines()[0].lstrip("# ") for stem, source in first.items()}


def cells(path: Path) -> Iterator[str]:
    """A stored notebook as HTML: text, code, and what the code shows."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield to_html(source)
            continue
        yield highlight(source, lexer, HtmlFormatter(cssclass="pdoc-code codehilite"))
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            kind = next(kind for kind in ("image/png", "text/html", "text/plain") if kind in data)
            shown = "".join(data[kind])
            picture = f'<img alt="" src="data:image/png;base64,{shown.replace(chr(10), "")}"/>'
            how = {"image/png": picture, "text/html": shown, "text/plain": f"<pre>{escape(shown)}</pre>"}
            yield f'<div class="output">{how[kind]}</div>'


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.links.add(value)
            elif key in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """`page: link` for every link within the site that leads nowhere, and every file that a page lacks."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    broken: list[str] = []
    for path, page in pages.items():
        for link in sorted(page.links):
            if link.startswith(("https://", "http://", "data:", "mailto:")):
                continue
            place, _, anchor = unquote(link).partition("#")
            target = (path.parent / place).resolve() if place else path
            if not target.is_file() or (target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return broken


def main(arguments: list[str]) -> None:
    """Build the site in the folder named, and fail if a link in it is broken."""
    site = Path(arguments[0])
    build(site)
    if broken := broken_links(site):
        sys.exit("broken links:\n" + "\n".join(broken))
    print(f"{site}/index.html")


if __name__ == "__main__":
    main(sys.argv[1:])
