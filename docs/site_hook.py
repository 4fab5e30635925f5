"""Makes the site of files that lie outside of docs/, too, without copying them: a hook of mkdocs.

The documents are written for a reader of the repository, so their links are paths from their own folder, such as
`../benchmarks/results/targets/softmax.png`. On the site, the reports, their pictures and CONTRIBUTING.md lie at
their paths in the repository, and docs/ at the root; links are changed accordingly. What is not on the site, such as
source files, stays as text without a link.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
BESIDE_DOCS = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/results/**/README.md",
    "benchmarks/results/**/*.png",
)

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files, config):
    """Adds the files beside docs/ to those of the site."""
    for pattern in BESIDE_DOCS:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            if not uri.startswith("benchmarks/results/local/"):
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Changes the links of a page from places in the repository to places on the site."""
    source = os.path.relpath(page.file.abs_src_path, ROOT)

    def change(link: re.Match) -> str:
        picture, text, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link.group()
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)).removeprefix("docs/")
        file = files.get_file_from_path(path)
        if file is None or file.inclusion.is_excluded():
            return text
        path = posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")
        return f"{picture}[{text}]({path}{hash_}{anchor})"

    pieces = _FENCED.split(markdown)  # every other one is a fenced block
    pieces[::2] = [_LINK.sub(change, piece) for piece in pieces[::2]]
    return "".join(pieces)
