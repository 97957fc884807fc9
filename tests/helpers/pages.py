"""What a reader sees on an HTML page, and a check that the page is well formed and complete in one file."""

from html.parser import HTMLParser

VOID = ("meta",)
ACTIVE = {"script", "link", "img", "iframe", "a"}
REFERENCES = {"src", "href", "onload"}


class Page(HTMLParser):
    """A parsed page.

    text: everything visible, one space between its parts. rows: cells of all table rows, heads included.

    Raises:
        AssertionError: if tags do not close in order, or the page runs code or needs another file.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())

    def row(self, first: str) -> list[str]:
        """The row that begins with this cell."""
        (row,) = (row for row in self.rows if row[0] == first)
        return row

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ACTIVE
        assert not REFERENCES & {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] in ("style", "title"):
            return
        self.parts.append(data)
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
