"""Build the documentation as a site, which works offline and from the file system.

    python scripts/docs_site.py [--serve]

The pages of docs/ stay as GitHub shows them. Their copies in build/pages differ in this:

- Links that leave docs/ lead to pages of the site: the changelog and the others of `PROJECT_PAGES`, and a page
  with the text of any other file of the repository, or with the list of a folder.
- Notebooks become pages.
- The lab notebook, the changelog and the texts of files are not searched.

`zensical build --strict` then fails for a link or an anchor that leads nowhere; afterwards every page of
build/site is read, and a page that loads anything from another site is an error, as is a lost link.
`make docs` runs this; it needs the extra `docs`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from notebook_page import notebook_markdown

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = DOCS / "zensical.toml"
WORK = ROOT / "build"
SITE = WORK / "site"
# Pages of the repository that are pages of the site.
PROJECT_PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
}
HISTORY = ("log.md", "project/changelog.md")  # longer than all other pages together
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
MAX_TEXT_BYTES = 100_000  # larger files are copied as they are
LINK = re.compile(r"(?P<open>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^ *(```|~~~)")
# A list that GitHub shows: Python-Markdown wants an empty line before it, and four spaces for a nested item.
ITEM = re.compile(r"- |\d+\. ")
NESTED_ITEM = re.compile(r"^ {2,3}(?=- |\d+\. )")


class Staging:
    """A copy of the pages, as the site generator reads them.

    Args:
        folder: receives zensical.toml and pages/; made anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = folder / "pages"

    def write(self) -> None:
        """Write all of it.

        Raises:
            FileNotFoundError: a page links to a file that does not exist.
        """
        shutil.rmtree(self.pages, ignore_errors=True)
        for source in sorted(path for path in DOCS.rglob("*") if path.is_file()):
            page = source.relative_to(DOCS).as_posix()
            if source.suffix == ".md":
                text = source.read_text(encoding="utf-8")
                self._write_page(page, text, source, is_searched=page not in HISTORY)
            elif source.suffix == ".ipynb":
                text = notebook_markdown(source.read_text(encoding="utf-8"))
                self._write_page(page.removesuffix(".ipynb") + ".md", text, source)
            elif source != CONFIG:
                self._copy(source, page)
        for name, page in PROJECT_PAGES.items():
            if page.startswith("project/"):
                source = ROOT / name
                text = source.read_text(encoding="utf-8")
                self._write_page(page, text, source, is_searched=page not in HISTORY)
        shutil.copyfile(CONFIG, self.folder / CONFIG.name)

    def _write_page(self, page: str, text: str, source: Path, is_searched: bool = True) -> None:
        """Write a page whose links lead to the site; `source` is the file that they are relative to."""
        lines: list[str] = []
        is_code = is_list = False
        for line in text.splitlines():
            if FENCE.match(line):
                is_code = not is_code
            if is_code:
                lines.append(line)
                continue
            if ITEM.match(line):
                if not is_list and lines and lines[-1]:
                    lines.append("")
                is_list = True
            elif not line:
                is_list = False
            lines.append(self._with_links(NESTED_ITEM.sub("    ", line), page, source))
        target = self.pages / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(("" if is_searched else NOT_SEARCHED) + "\n".join(lines) + "\n", "utf-8")

    def _with_links(self, line: str, page: str, source: Path) -> str:
        """A line of Markdown whose relative links lead to pages of the site."""

        def link(match: re.Match[str]) -> str:
            target, anchor = match["target"], match["anchor"] or ""
            if re.match(r"[a-z]+:", target):
                return match[0]
            file = Path(os.path.normpath(source.parent / target))
            path = relative_path(self._page_of(file), page)
            return f"{match['open']}{path}{anchor})"

        return LINK.sub(link, line)

    def _page_of(self, file: Path) -> str:
        """Path below pages/ of a file of the repository, which is staged if it is no page of docs/."""
        name = file.relative_to(ROOT).as_posix()
        if not file.exists():
            raise FileNotFoundError(f"{name}: a page links to it, and it does not exist")
        if file.is_relative_to(DOCS) and file.is_file() and file != CONFIG:
            page = file.relative_to(DOCS).as_posix()
            return re.sub(r"\.ipynb$", ".md", page)
        if name in PROJECT_PAGES:
            return PROJECT_PAGES[name]
        return self._stage_folder(file, name) if file.is_dir() else self._stage_file(file, name)

    def _stage_folder(self, folder: Path, name: str) -> str:
        """A page that lists the files of a folder."""
        page = f"files/{name}/index.md"
        if not (self.pages / page).is_file():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            links = [
                f"- [{path.relative_to(folder)}]({relative_path(self._page_of(path), page)})"
                for path in files
                if "__pycache__" not in path.parts
            ]
            self._write_text(page, f"# {name}\n\n" + "\n".join(links) + "\n")
        return page

    def _stage_file(self, file: Path, name: str) -> str:
        """A page with the text of a file, or a copy of a file that is no short text."""
        content = file.read_bytes()
        if b"\0" in content or len(content) > MAX_TEXT_BYTES:
            self._copy(file, f"files/{name}")
            return f"files/{name}"
        page = f"files/{name}.md"
        text = content.decode("utf-8")
        fence = "````" if "```" in text else "```"
        language = LANGUAGES.get(file.suffix, "text")
        self._write_text(page, f"# {name}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n")
        return page

    def _write_text(self, page: str, text: str) -> None:
        target = self.pages / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(NOT_SEARCHED + text, encoding="utf-8")

    def _copy(self, file: Path, page: str) -> None:
        target = self.pages / page
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def relative_path(target: str, page: str) -> str:
    """The link from one page of the site to another, both relative to the root of the site."""
    return PurePosixPath(os.path.relpath(target, PurePosixPath(page).parent)).as_posix()


def faults(site: Path) -> Iterator[str]:
    """What a built site loads from elsewhere, and links of it that lead nowhere."""
    for page in sorted(site.rglob("*.html")):
        html = page.read_text(encoding="utf-8")
        name = page.relative_to(site).as_posix()
        for tag, url in re.findall(r"<(\w+)\b[^>]*?\b(?:src|href)=\"?([^\"\s>]+)", html):
            if re.match(r"(https?:)?//", url):
                if tag != "a" and "rel=canonical" not in html:
                    yield f"{name} loads {url}"
            elif not re.match(r"[a-z]+:|#|$", url) and page.name != "404.html":
                file = page.parent / unquote(url.partition("#")[0].partition("?")[0])
                if not file.exists():
                    yield f"{name} links to {url}, which does not exist"


def main() -> None:
    """Stage the pages, build the site and look at it."""
    Staging(WORK).write()
    command = [sys.executable, "-m", "zensical"]
    config = ["--config-file", str(WORK / "zensical.toml")]
    if "--serve" in sys.argv[1:]:
        served = subprocess.run([*command, "serve", *config], check=False)  # noqa: S603
        raise SystemExit(served.returncode)
    built = subprocess.run([*command, "build", "--strict", "--clean", *config], check=False)  # noqa: S603
    if built.returncode:
        raise SystemExit(built.returncode)
    lost = list(faults(SITE))
    if lost:
        raise SystemExit("\n".join(dict.fromkeys(lost)))
    print(f"open {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
