"""Adds to the site what lies outside of docs/, without copies in the repository: a hook of mkdocs.

The documents are written for a reader of the repository: a link is a path from the document's own folder, such as
`../benchmarks/results/targets/softmax.png`. The site has docs/ at its root, and everything else at its path in the
repository. This hook adds

- the first lines of README.md at the top of the home page;
- CONTRIBUTING.md, CHANGELOG.md, and the reports and pictures of benchmarks/results;
- a page for each section of docs/reference.md, which is one file in the repository. A comment `<!-- ::: NAME -->` there
  becomes the docstring of NAME;
- a page for each source file or folder that a document links to. With `repo_url`, the link leads to the repository;
- weights of the search: pages of users come before pages of builders;
- a link from each picture of a plot to the picture itself, which a phone shows scaled;
- places where a long name in a table may break, and none where a minus or a flag must not;
- MathJax, from the package django-static-mathjax;
- addresses of the types of other packages that appear in signatures.

Nothing is fetched from the network.
"""

import importlib.resources
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
BESIDE_DOCS = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/results/**/README.md",
    "benchmarks/results/NOTES.md",
    "benchmarks/results/**/*.png",
)
TYPES = {
    "jax.Array": "https://docs.jax.dev/en/latest/_autosummary/jax.Array.html",
    "jax.typing.ArrayLike": "https://docs.jax.dev/en/latest/jax.typing.html",
    "jax.typing.DTypeLike": "https://docs.jax.dev/en/latest/jax.typing.html",
    "numpy.integer": "https://numpy.org/doc/stable/reference/arrays.scalars.html#numpy.integer",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html",
    "collections.abc.Callable": "https://docs.python.org/3/library/collections.abc.html#collections.abc.Callable",
    "collections.abc.Sequence": "https://docs.python.org/3/library/collections.abc.html#collections.abc.Sequence",
    "typing.Any": "https://docs.python.org/3/library/typing.html#typing.Any",
    "typing.Literal": "https://docs.python.org/3/library/typing.html#typing.Literal",
    "typing.NamedTuple": "https://docs.python.org/3/library/typing.html#typing.NamedTuple",
}
REFERENCE = ROOT / "docs" / "reference.md"
PARTS = "API reference"  # the entry of the navigation that lists the sections of docs/reference.md
# How much a match on a page counts in the search, by the first part of its address. Others count 1.
WEIGHTS = {"faq": 3, "reference": 3, "limits": 2.5, "install": 2.5, "recipes": 2.5, "about": 2.5, "migration": 2}
WEIGHTS |= {"serving": 2, "tutorial": 2, "sharding": 1.5, "libraries": 1.5, "accuracy": 1.5, "performance": 1.2}
WEIGHTS |= {"dev": 0.3}
WEIGHTS |= {"CONTRIBUTING": 0.2, "CHANGELOG": 0.2, "benchmarks": 0.1}
LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}

# an entry of the reference: a heading, if there is one, and a comment with a name and options
ENTRY = re.compile(r"(?:^### `[\w.]+`\n\n)?^<!-- (::: pallas_softmax\.(\w+))(?: |\n((?:    .*\n)*))-->$", re.MULTILINE)
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_TABLE = re.compile(r"(<table>.*?</table>)", re.DOTALL)
_CODE = re.compile(r"<code>((?:[^<]|<wbr>)*)</code>")
_FLAG = r"(?<!\S)--?[a-z]\S*"
_BLOCK = re.compile(r"(<pre.*?</pre>|<script.*?</script>)", re.DOTALL)
_TAG = re.compile(r"(<code.*?</code>|<[^>]*>)", re.DOTALL)
_PLOT = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')


def for_the_site(text: str) -> str:
    """Returns the reference with its entries as mkdocstrings takes them, which makes the headings itself."""
    return ENTRY.sub(lambda entry: f"{entry[1]}\n{entry[3] or ''}", text)


def _sections() -> Iterator[tuple[str, str]]:
    """Yields the heading and the text of each section of the reference."""
    _, *parts = SECTION.split(REFERENCE.read_text())
    return zip(parts[::2], parts[1::2])


def _anchor(heading: str) -> str:
    """Returns the anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _slug(heading: str) -> str:
    """Returns the address of a section of the reference: "Softmax: drop-in for jax.nn" becomes "softmax"."""
    return _anchor(heading.partition(":")[0])


def _places() -> dict[str, str]:
    """Returns the page of each anchor of docs/reference.md that another page may link to."""
    found = {}
    for heading, text in _sections():
        names = [_anchor(name) for name in re.findall(r"^### `(\w+)`$", text, re.MULTILINE)]
        found |= dict.fromkeys([_anchor(heading), *names], f"reference/{_slug(heading)}.md")
    return found


def on_config(config):
    """Lists the sections of the reference in the navigation."""
    parts = [{heading.partition(":")[0]: f"reference/{_slug(heading)}.md"} for heading, _ in _sections()]
    for group in config.nav:
        for entries in group.values():
            for entry in entries if isinstance(entries, list) else ():
                if PARTS in entry:
                    entry[PARTS] = [{"Overview": "reference.md"}, *parts]
    return config


def on_files(files, config):
    """Adds the files that lie outside of docs/."""
    for pattern in BESIDE_DOCS:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            if not uri.startswith("benchmarks/results/local/"):
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    _add_mathjax(files, config)
    _add_reference(files, config)
    if not config.repo_url:
        for page in list(files.documentation_pages(inclusion=InclusionLevel.is_included)):
            for _, _, target in _LINK.findall(page.content_string):
                if "://" not in target and not target.startswith("#"):
                    _add_source(_in_repository(page, target), files, config)
    autorefs = config.plugins["autorefs"]
    for name, url in TYPES.items():
        autorefs.register_url(name, url)
    return files


def on_page_markdown(markdown, page, config, files):
    """Changes the links of a page from paths in the repository to addresses on the site."""

    def change(link: re.Match) -> str:
        picture, text, target = link.groups()
        if "://" in target or (target.startswith("#") and not is_reference):
            return link.group()
        path, anchor = _in_repository(page.file, target), re.sub(r"^[^#]*", "", target)
        uri = path.removeprefix("docs/")
        if uri == "reference.md" and anchor:
            uri = places[anchor.removeprefix("#")]
        names = (uri, f"{uri}/README.md", *(f"{name}{end}" for name in (uri, path) for end in (".md", "/index.md")))
        on_site = [name for name in names if _is_on_site(files, name)]
        if on_site:
            place = posixpath.relpath(on_site[0], posixpath.dirname(page.file.src_uri) or ".")
        elif config.repo_url:
            place = f"{config.repo_url.rstrip('/')}/blob/main/{path}"
        else:
            return text
        return f"{picture}[{text}]({place}{anchor})"

    page.meta.setdefault("search", {}).setdefault("boost", WEIGHTS.get(re.split(r"[/.]", page.file.src_uri)[0], 1))
    is_reference = page.file.src_uri.startswith("reference")
    if page.file.abs_src_path is None and not is_reference:  # made by _add_source
        return markdown
    if page.file.src_uri == "reference.md":
        markdown = SECTION.split(markdown)[0]
    if page.file.src_uri == "index.md":
        markdown = _home(markdown)
    places = _places()
    pieces = _FENCED.split(markdown)  # every other one is a fenced block
    pieces[::2] = [_LINK.sub(change, piece) for piece in pieces[::2]]
    return "".join(pieces)


def _home(markdown: str) -> str:
    """Returns the home of the site: the README as far as its quick start, then the sections of docs/index.md."""
    head = (ROOT / "README.md").read_text().partition("\n## ")[0]
    head = re.sub(r'(\]\(|")docs/', r"\1", head).replace("(#limits)", "(limits.md)")
    return f"{head}\n\n## " + markdown.partition("\n## ")[2]


def _in_repository(file, target: str) -> str:
    """Returns the path in the repository that a link of a document leads to."""
    place = Path(file.abs_src_path or REFERENCE).relative_to(ROOT)
    path = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(place.parent.as_posix(), path)) if path else place.as_posix()


def _is_on_site(files, uri: str) -> bool:
    file = files.get_file_from_path(uri)
    return file is not None and not file.inclusion.is_excluded()


def on_page_content(html, page, config, files):
    """Makes each picture of a plot a link to itself."""
    return _PLOT.sub(r'<p class="plot"><a href="\2">\1</a></p>', html)


def on_post_page(output, page, config):
    """Says where lines may break. The search has read the page before, so it finds names without these marks."""
    pieces = _BLOCK.split(output)  # every other one is a block of code
    pieces[::2] = [_with_breaks(piece) for piece in pieces[::2]]
    return "".join(pieces)


def _with_breaks(html: str) -> str:
    pieces = _TABLE.split(html)  # every other one is a table
    pieces[1::2] = [_CODE.sub(_breakable, table) for table in pieces[1::2]]
    html = _CODE.sub(_with_whole_flags, "".join(pieces))
    texts = _TAG.split(html)  # every other one is between two tags
    texts[::2] = [re.sub(r"(?<![\w)])-(?=inf\b|NaN\b|\d)", "-\u2060", text) for text in texts[::2]]
    return "".join(texts)


def _breakable(code: re.Match) -> str:
    """Lets a long name break after an underscore, a dot, a slash or a parenthesis, and before a capital letter."""
    pieces = re.split(f"({_FLAG})", code[1])  # every other one is a flag
    pieces[::2] = [
        re.sub(r"(?<=\w\w)[_./(]+(?=\w{3})|(?<=[A-Za-z])(?=[A-Z][a-z]{2})", r"\g<0><wbr>", text) for text in pieces[::2]
    ]
    return "<code>" + "".join(pieces) + "</code>"


def _with_whole_flags(code: re.Match) -> str:
    """Moves a flag of a command, such as --seconds=0.1, to the next line as a whole."""
    return "<code>" + re.sub(_FLAG, r'<span class="flag">\g<0></span>', code[1]) + "</code>"


def _add_reference(files, config):
    """Adds a page for each section of the reference."""
    for heading, text in _sections():
        text = for_the_site(text)
        if "```python" in text:
            lines = "The examples use `x` and `rounded` of the [overview](reference.md).\n\n"
            text = re.sub(r"^(?=::: )", lines, text, count=1, flags=re.MULTILINE)
        content = f"# {heading}\n{text}"
        files.append(File.generated(config, f"reference/{_slug(heading)}.md", content=content))


def _add_source(path: str, files, config):
    """Adds a page that shows a file of the repository, or that lists a folder and links to its files."""
    place = ROOT / path
    if path.endswith((".md", ".png", ".svg")) or not place.exists() or place == ROOT:
        return
    if place.is_file():
        language = LANGUAGES.get(place.suffix, "text")
        uri, body = f"{path}.md", f"~~~~~~~~{language}\n{place.read_text()}\n~~~~~~~~"
    elif (place / "README.md").exists():
        return
    else:
        names = sorted(p.name for p in place.iterdir() if p.is_file() and not p.name.startswith("."))
        uri, body = f"{path}/index.md", "\n".join(f"- {_entry(path, name, files, config)}" for name in names)
    if files.get_file_from_path(uri) is None:
        head = f'---\ntitle: "{path}"\nsearch: {{exclude: true}}\nhide: [toc]\n---\n'
        content = f"{head}\n# {path}\n\n{body}\n"
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))


def _entry(folder: str, name: str, files, config) -> str:
    """Returns the line of a file in the page of its folder."""
    path = f"{folder}/{name}"
    if name.endswith((".csv", ".json")) and files.get_file_from_path(path) is None:  # offered as they are
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    elif not name.endswith((".png", ".csv", ".json")):
        _add_source(path, files, config)
        name += ".md"
    return f"[{name.removesuffix('.md')}]({name})"


def _add_mathjax(files, config):
    """Adds MathJax and its fonts."""
    mathjax = Path(str(importlib.resources.files("mathjax"))) / "static/mathjax/es5"
    fonts = mathjax / "output/chtml/fonts/woff-v2"
    for path in mathjax / "tex-chtml.js", *sorted(fonts.glob("*.woff")):
        uri = f"assets/mathjax/{path.relative_to(mathjax).as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
