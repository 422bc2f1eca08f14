"""Write long texts of several kinds, out of packages that anybody can install, to a parquet file for these studies.

    python scripts/studies/long_texts.py -o kinds.parquet
    python scripts/studies/long_texts.py --python transformers/generation --python pip/_internal -o code.parquet
    python scripts/studies/long_texts.py --python networkx/classes --python pendulum --excerpt 16384 -o excerpts.parquet

Without ``--python``: documentation, manual pages, standards and law, logs of changes and tables, from packages that
``apt-get download`` brings (they are unpacked below a temporary folder and not installed), and plays from the package
of the demo. With it: source code, the .py files of a folder of site-packages in the order of their paths, tests left
out, each under a line with its path; with ``--excerpt``, the part of it whose second half repeats most from afar (see
``need_for_length.py``), in SmolLM2's tokens and a few more, to train on. A row holds name, kind,
package with its version, and text.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet
from typer import BadParameter, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.options import run_script
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.texts.documents import TEXT_PACKAGE, installed_texts
from ctxext.texts.repeats import far_repeats

SHORTEST_FILE = 400
"""Characters below which a file, such as an empty __init__.py, is left out."""

SPARE = 116
"""Tokens more in an excerpt, since decoded tokens may be fewer when they are read again."""

PLAYS = ("king-john", "richard-iii", "coriolanus")


class Source(NamedTuple):
    """Files of a Debian package that are one text.

    Args:
        kind: of text.
        name: of the text.
        package: of Debian.
        files: pattern below the root.
    """

    kind: str
    name: str
    package: str
    files: str


_SPHINX = "usr/share/doc/*/html/_sources"
SOURCES = (
    Source("documentation", "python library", "python3.11-doc", f"{_SPHINX}/library/*.rst.txt"),
    Source("documentation", "linux administration", "linux-doc-6.1", f"{_SPHINX}/admin-guide/*.rst.txt"),
    Source("documentation", "linux video", "linux-doc-6.1", f"{_SPHINX}/userspace-api/media/v4l/*.rst.txt"),
    Source("manual pages", "git commands", "git-man", "usr/share/man/man1/*"),
    Source("manual pages", "system calls", "manpages-dev", "usr/share/man/man2/*"),
    Source("manual pages", "systemd files", "systemd", "usr/share/man/man5/*"),
    Source("standards and law", "debian policy", "debian-policy", "usr/share/doc/debian-policy/policy.txt.gz"),
    Source("standards and law", "file hierarchy", "debian-policy", "usr/share/doc/debian-policy/fhs/fhs-*.txt.gz"),
    Source("standards and law", "licences", "base-files", "usr/share/common-licenses/*G*PL-*"),
    Source("logs of changes", "git changes", "git-doc", "usr/share/doc/git-doc/changelog.gz"),
    Source("logs of changes", "openssh changes", "openssh-client", "usr/share/doc/openssh-client/changelog.gz"),
    Source("logs of changes", "systemd news", "systemd", "usr/share/doc/systemd/NEWS.gz"),
    Source("tables", "characters", "unicode-data", "usr/share/unicode/UnicodeData.txt"),
    Source("tables", "languages", "iso-codes", "usr/share/xml/iso-codes/iso_639-3.xml"),
    Source("tables", "emoji", "unicode-data", "usr/share/unicode/emoji/emoji-test.txt"),
)

# Named before anything was measured on them, to test what docs/evidence/zero-shot.md predicts.
NAMED = (
    Source("documentation", "vim documentation", "vim-runtime", "usr/share/vim/vim*/doc/*.txt"),
    Source("documentation", "perl manual", "perl-doc", "usr/share/perl/*/pod/*.pod"),
    Source("logs of changes", "bash changes", "bash", "usr/share/doc/bash/CHANGES.gz"),
    Source("tables", "public suffixes", "publicsuffix", "usr/share/publicsuffix/public_suffix_list.dat"),
)
NAMED_PYTHON = (
    *("PIL", "scipy/optimize", "sympy/core", "openai/resources"),
    *("fastapi", "networkx/drawing", "pydantic", "tornado"),
)


class Text(NamedTuple):
    """One row of the file."""

    name: str
    kind: str
    package: str
    text: str


def joined(paths: list[Path], root: Path, most: int, comment: str) -> str:
    """Return files under lines with their paths, at most ``most`` characters."""
    parts, size = [], 0
    for path in paths:
        data = path.read_bytes()
        source = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", errors="replace")
        if len(source) < SHORTEST_FILE:
            continue
        parts.append(f"{comment} File: {path.relative_to(root).as_posix()}\n\n{source}\n\n")
        size += len(parts[-1])
        if size >= most:
            break
    return "".join(parts)[:most]


def code_texts(packages: Sequence[str], most: int) -> Iterator[Text]:
    """Yield the source of folders of site-packages.

    Raises:
        BadParameter: if a folder is not installed.
    """
    root = Path(sysconfig.get_paths()["purelib"])
    missing = [package for package in packages if not (root / package).is_dir()]
    if missing:
        raise BadParameter(f"not installed here: {', '.join(missing)}")
    distributions = metadata.packages_distributions()
    for package in packages:
        files = [path for path in sorted((root / package).rglob("*.py")) if "tests" not in path.parts]
        [distribution, *_] = distributions[package.split("/")[0]]
        version = f"{distribution} {metadata.version(distribution)}"
        yield Text(package, "source code", version, joined(files, root, most, "#"))


def debian_texts(sources: Sequence[Source], most: int) -> Iterator[Text]:
    """Yield the texts of Debian's packages, each downloaded once and unpacked."""
    with tempfile.TemporaryDirectory() as folder:
        roots: dict[str, tuple[Path, str]] = {}
        for source in sources:
            if source.package not in roots:
                command = ["apt-get", "download", "-o", "APT::Sandbox::User=root", "-qq", source.package]
                subprocess.run(command, cwd=folder, check=True)
                [archive] = Path(folder).glob(f"{source.package}_*.deb")
                root = Path(folder, source.package)
                subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
                roots[source.package] = root, archive.name.split("_")[1].replace("%3a", ":")
            root, version = roots[source.package]
            files = sorted(path for path in root.glob(source.files) if path.is_file() and not path.is_symlink())
            if not files:
                raise SystemExit(f"{source.package} {version} has no {source.files}.")
            yield Text(source.name, source.kind, f"{source.package} {version}", joined(files, root, most, "=="))


def plays(most: int) -> Iterator[Text]:
    """Yield three plays of the package of the demo."""
    by_name = {path.stem: path for path in installed_texts()}
    for name in PLAYS:
        text = by_name[name].read_text(encoding="utf-8")[:most]
        yield Text(name, "plays", f"{TEXT_PACKAGE} {metadata.version(TEXT_PACKAGE)}", text)


def repetitive(text: Text, tokens: int, tokenizer: Any, each: int) -> list[tuple[float, Text]]:
    """Return parts of a text whose second half repeats most of what stands half the tokens or more before, with shares.

    Raises:
        BadParameter: if the text is too short.
    """
    ids, half = tokenizer(text.text)["input_ids"], tokens // 2
    starts = range(0, len(ids) - tokens + 1, half)
    if not starts:
        raise BadParameter(f"{text.name} has {len(ids):,} tokens, not {tokens:,}")
    parts: list[tuple[float, int]] = []
    for part in sorted(((far_repeats(ids[s : s + tokens], half, half), s) for s in starts), reverse=True):
        if len(parts) < each and all(abs(part[1] - other) >= tokens for _, other in parts):
            parts.append(part)
    return [(share, text._replace(text=tokenizer.decode(ids[s : s + tokens + SPARE]))) for share, s in parts]


def main(
    output: Annotated[Path, Option("--output", "-o", help="the parquet file")],
    python: Annotated[list[str], Option(help="folder below site-packages, such as transformers/generation")] = [],  # noqa: B006
    named: Annotated[bool, Option("--named", help="the twelve that were named before they were measured")] = False,
    excerpt: Annotated[int, Option(min=0, help="tokens of the part that repeats most; 0 for all of a text")] = 0,
    each: Annotated[int, Option(min=1, help="such parts of a text, at most, which do not overlap")] = 1,
    keep: Annotated[int, Option(min=0, help="parts of all texts, those that repeat most; 0 for all")] = 0,
    characters: Annotated[int, Option(min=1, help="characters of a text, at most")] = 260_000,
) -> None:
    """Write one row (name, kind, package, text) a text, and print their sizes."""
    if named:
        texts = [*code_texts(NAMED_PYTHON, characters), *debian_texts(NAMED, characters)]
    else:
        texts = list(code_texts(python, characters) if python else debian_texts(SOURCES, characters))
        texts += [] if python else plays(characters)
    if excerpt:
        tokenizer = load_checkpoint(None).tokenizer
        parts = [part for text in texts for part in repetitive(text, excerpt, tokenizer, each)]
        kept = sorted(parts, key=lambda part: -part[0])[:keep] if keep else parts
        texts = [text for _, text in kept]
    parquet.write_table(pa.Table.from_pylist([text._asdict() for text in texts]), output)
    for text in texts:
        print(f"{text.kind}: {text.name} ({text.package}), {len(text.text):,} characters")


if __name__ == "__main__":
    run_script(main)
