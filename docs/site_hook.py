"""Adds to the site what lies outside of docs/, without copies in the repository: a hook of mkdocs.

The documents are written for a reader of the repository: a link is a path from the document's own folder, such as
`../benchmarks/results/targets/softmax.png`. The site has docs/ at its root, and everything else at its path in the
repository. This hook adds

- CONTRIBUTING.md, CHANGELOG.md, and the reports and pictures of benchmarks/results;
- a page for each source file or folder that a document links to. With `repo_url`, the link leads to the repository;
- MathJax, from the package django-static-mathjax;
- addresses of the types of other packages that appear in signatures.

Nothing is fetched from the network.
"""

import importlib.resources
import posixpath
import re
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
LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files, config):
    """Adds the files that lie outside of docs/."""
    for pattern in BESIDE_DOCS:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            if not uri.startswith("benchmarks/results/local/"):
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    _add_mathjax(files, config)
    if not config.repo_url:
        for page in list(files.documentation_pages(inclusion=InclusionLevel.is_included)):
            for _, _, target in _LINK.findall(Path(page.abs_src_path).read_text()):
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
        if "://" in target or target.startswith("#"):
            return link.group()
        path, anchor = _in_repository(page.file, target), re.sub(r"^[^#]*", "", target)
        uri = path.removeprefix("docs/")
        on_site = [name for name in (uri, f"{uri}.md", f"{uri}/index.md") if _is_on_site(files, name)]
        if on_site:
            place = posixpath.relpath(on_site[0], posixpath.dirname(page.file.src_uri) or ".")
        elif config.repo_url:
            place = f"{config.repo_url.rstrip('/')}/blob/main/{path}"
        else:
            return text
        return f"{picture}[{text}]({place}{anchor})"

    if page.file.abs_src_path is None:  # made by _add_source
        return markdown
    pieces = _FENCED.split(markdown)  # every other one is a fenced block
    pieces[::2] = [_LINK.sub(change, piece) for piece in pieces[::2]]
    return "".join(pieces)


def _in_repository(file, target: str) -> str:
    """Returns the path in the repository that a link of a document leads to."""
    folder = Path(file.abs_src_path).relative_to(ROOT).parent.as_posix()
    return posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))


def _is_on_site(files, uri: str) -> bool:
    file = files.get_file_from_path(uri)
    return file is not None and not file.inclusion.is_excluded()


def _add_source(path: str, files, config):
    """Adds a page that shows a file of the repository, or that lists a folder and links to its files."""
    place = ROOT / path
    if path.endswith((".md", ".png", ".svg")) or not place.exists():
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
