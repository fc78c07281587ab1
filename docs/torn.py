"""Markup of docstrings that Sphinx does not catch, found on the built pages of the reference."""

from html.parser import HTMLParser

_CODE = {"pre", "code", "script", "style", "math"}


class _Page(HTMLParser):
    """Collects text with backticks outside code, and lists of definitions or quotes inside a field of a docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"br", "img", "input", "link", "meta", "hr", "col", "source"}:
            return
        if tag in {"dl", "blockquote"} and any("field-list" in kind for _, kind in self.open):
            self.found.append(f"<{tag}> inside a field: check the indentation of its lines")
        self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = any(tag in _CODE for tag, _ in self.open)
        if ("``" if inside else "`") in data:
            self.found.append(f"a backtick in {data.strip()[:80]!r}: end the code before a space or a full stop")


def torn_markup(html: str) -> list[str]:
    """The places of a page where markup is torn, in words."""
    page = _Page()
    page.feed(html)
    return page.found
