"""Where results go: JSON or CSV to standard output, and files of the kinds that their endings say."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from ctxext.cli.options import check_output
from ctxext.errors import InvalidParameterError
from ctxext.files import whole_file, write_whole

__all__ = ["check_outputs", "write_outputs"]

DATA = (".json", ".csv")


def check_outputs(output: Sequence[Path] | None, as_json: bool, as_csv: bool) -> None:
    """Refuse outputs that could not be written, before anything is computed.

    Raises:
        InvalidParameterError: two forms for standard output, or a picture without matplotlib.
        UnknownNameError: an ending that says no kind of file.
        CheckpointError: a folder that does not exist.
    """
    if as_json and as_csv:
        raise InvalidParameterError("--json and --csv both print to standard output; give one, the other with -o FILE.")
    for path in output or ():
        if path.suffix not in DATA:
            from ctxext.evaluation.report.style import require_matplotlib

            require_matplotlib()
            check_output(path)
        elif not path.parent.is_dir():
            raise InvalidParameterError(f"{path} cannot be written: there is no directory {path.parent}.")


def write_outputs(
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    draw: Callable[[Path], None],
    output: Sequence[Path] | None = None,
    as_json: bool = False,
    as_csv: bool = False,
) -> None:
    """Print and write a result.

    Args:
        result: plain JSON values.
        rows: flat, all with the same keys.
        draw: saves a figure.
        output: files; each appears whole or not at all.
        as_json: print JSON.
        as_csv: print CSV.

    Raises:
        InvalidParameterError: a file that cannot be written.
    """
    if as_json:
        typer.echo(_json(result), nl=False)
    if as_csv:
        typer.echo(_csv(rows), nl=False)
    for path in output or ():
        try:
            if path.suffix == ".json":
                write_whole(path, _json(result))
            elif path.suffix == ".csv":
                write_whole(path, _csv(rows))
            else:
                with whole_file(path) as half:
                    draw(half)
        except OSError as error:
            raise InvalidParameterError(f"Cannot write {str(path)!r}: {error.strerror}.") from error


def _json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
