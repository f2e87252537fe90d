"""Build the site (`make docs`): collect its pages, render them and check the links.

    python docs/make_site.py

The sources are the guide, README, CONTRIBUTING and CHANGELOG; links between files become links between pages. The
references come from the program, the gallery from real runs.
"""

import html
import json
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import gallery
import links
import schemas

from quanterr import guide
from quanterr.documents import kinds

ROOT = gallery.ROOT
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
SITE = BUILD / "site"
RUNS = BUILD / "gallery"
KINDS = [*(kind.name.lower() for kind in kinds.KINDS.values()), "origin"]
RECORDERS = ("examples/capture_inputs.py", "examples/comfyui/__init__.py")
# Path in the repository → path of the page on the site.
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "licence.md",
    "examples/ci": "ci.md",
    **dict.fromkeys(RECORDERS, "recording.md"),
    "examples/report-map.png": "examples/report-map.png",
    "quanterr/guide": "guide/index.md",
    **{f"quanterr/guide/{topic}.md": f"guide/{topic}.md" for topic in guide.TOPICS},
}
SOURCES = "https://raw.githubusercontent.com/quanterr/quanterr/main"  # of pages as plain Markdown
LANGUAGES = {".yml": "yaml", ".toml": "toml", ".jq": "jq", ".py": "python"}
OF_CI = "# Continuous integration\n\nFiles to copy. [Gates](guide/gates.md) explains what they do.\n"
OF_RECORDERS = (
    "# Recording calls\n\nPrograms to copy, which record calls of a denoiser for "
    "[evaluate](guide/evaluate-data.md#denoisers): for a pipeline of diffusers, and as a node of ComfyUI.\n"
)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
BOLD = re.compile(r'(?:^<span style="font-weight: bold">.*</span>\n)+', re.MULTILINE)
LISTED = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n")
TAG = re.compile(r"<[^>]+>")


def main() -> None:
    """Collect the pages, build the site and check it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    for source, place in PLACES.items():
        if source.endswith(".md"):
            write(place, adapt_links((ROOT / source).read_text("utf-8"), source))
    write("guide/index.md", make_guide_index())
    write("llms.txt", make_llms_txt())
    write("ci.md", show_files(OF_CI, sorted((ROOT / "examples/ci").iterdir())))
    write("recording.md", show_files(OF_RECORDERS, [ROOT / name for name in RECORDERS]))
    write("licence.md", f"# Licence\n\n```\n{(ROOT / 'LICENSE').read_text('utf-8')}```\n")
    write("reference/library.md", (DOCS / "library.md").read_text("utf-8"))
    write("reference/commands.md", make_commands_page())
    for kind in KINDS:
        schema = run("-m", "quanterr", "schema", kind)
        write(f"reference/{kind}.schema.json", schema)
        write(f"reference/{kind}.md", schemas.make_page(kind, json.loads(schema)))
    write("gallery/index.md", gallery.make(RUNS))
    for exhibit in gallery.EXHIBITS:
        if exhibit.page:
            shutil.copy(RUNS / exhibit.page, PAGES / "gallery")
    (PAGES / "examples").mkdir()
    shutil.copy(ROOT / "examples/report-map.png", PAGES / "examples")
    shutil.copy(DOCS / "site.css", PAGES)
    shutil.copy(DOCS / "zensical.toml", BUILD)  # a site must be below its settings
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=BUILD, check=True)
    (SITE / "404.html").unlink()  # its links work only on a site at the root of its host
    links.check(SITE)


def write(place: str, text: str) -> None:
    """Write a page of the site."""
    path = PAGES / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def run(*words: str) -> str:
    """Run Python with these arguments and return its output."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def adapt_links(text: str, source: str) -> str:
    """Return a page of the repository as a page of the site.

    Markers of generated parts are removed, and links lead to pages of the site.

    Raises:
        SystemExit: the site has no page for a link.
    """

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if target not in PLACES:
            raise SystemExit(f"{source}: the site has no page for {found[1]}; PLACES lists its pages")
        return f"]({posixpath.relpath(PLACES[target], posixpath.dirname(PLACES[source]))}{found[2] or ''})"

    pieces = FENCED.split(guide.MARKER.sub("", text))
    return "".join(piece if piece.startswith("```") else LINK.sub(link, piece) for piece in pieces)


def make_guide_index() -> str:
    """Return the list of pages with the first sentence of each."""
    return "\n".join(["# Guide", "", "`quanterr guide` shows these pages in a terminal.", "", *list_pages("{}.md")])


def list_pages(address: str) -> list[str]:
    """Return a line with a link for each page of the guide."""
    pages = {topic: guide.read_page(topic).splitlines() for topic in guide.TOPICS}
    return [f"- [{lines[0].removeprefix('# ')}]({address.format(topic)}): {lines[2]}" for topic, lines in pages.items()]


def make_llms_txt() -> str:
    """Return the list of the guide's pages as Markdown for language models, in the form of llmstxt.org."""
    summary = (ROOT / "README.md").read_text("utf-8").split("\n\n")[1].replace("\n", " ")
    lines = ["# quanterr", "", f"> {summary}", "", "Begin with the page on automation.", "", "## Guide", ""]
    return "\n".join([*lines, *list_pages(f"{SOURCES}/quanterr/guide/{{}}.md")]) + "\n"


def show_files(text: str, files: Iterable[Path]) -> str:
    """Return a page that begins with a text and shows files, each in full."""
    for path in files:
        name = path.relative_to(ROOT / "examples").as_posix()
        text += f"\n## {name}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text('utf-8')}```\n"
    return text


def make_commands_page() -> str:
    """Return the help of all commands as typer writes it, with examples as code and without truncated sentences."""
    text = run("-m", "typer", "quanterr.cli", "utils", "docs", "--name", "quanterr", "--title", "Commands")
    text = LISTED.sub("", text)
    return BOLD.sub(lambda found: f"```sh\n{html.unescape(TAG.sub('', found[0]))}```\n", text)


if __name__ == "__main__":
    main()
