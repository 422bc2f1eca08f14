"""Where results go: JSON or CSV to standard output, and files of the kinds that their endings say."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import typer

from ctxext.cli.options import Csv, Json, Output, check_output
from ctxext.errors import InvalidParameterError
from ctxext.files import whole_file, write_whole

__all__ = ["OutputOptions"]

DATA = (".json", ".csv")


@runtime_checkable
class Measurement(Protocol):
    """What every measurement ends in: plain JSON values, and flat rows that all have the same keys."""

    def to_dict(self) -> Mapping[str, Any]: ...

    def rows(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where a result goes beside the terminal."""

    output: Output = None
    as_json: Json = False
    as_csv: Csv = False

    @property
    def to_stdout(self) -> bool:
        """Whether standard output is for a program, so that nothing else may be printed there."""
        return self.as_json or self.as_csv

    def check(self) -> None:
        """Refuse outputs that could not be written, before anything is computed.

        Raises:
            InvalidParameterError: two forms for standard output, or a picture without matplotlib.
            UnknownNameError: an ending that says no kind of file.
            CheckpointError: a folder that does not exist.
        """
        if self.as_json and self.as_csv:
            raise InvalidParameterError(
                "--json and --csv both print to standard output; give one, the other with -o FILE."
            )
        for path in self.output or ():
            if path.suffix not in DATA:
                from ctxext.evaluation.report.style import require_matplotlib

                require_matplotlib()
                check_output(path)
            elif not path.parent.is_dir():
                raise InvalidParameterError(f"{path} cannot be written: there is no directory {path.parent}.")

    def write(self, result: Measurement, *, show: Callable[[], None], draw: Callable[[Path], None]) -> None:
        """Print and write a result; each file appears whole or not at all.

        Args:
            result: what was measured.
            show: prints it for a reader.
            draw: saves a figure of it.

        Raises:
            InvalidParameterError: a file that cannot be written.
        """
        data, rows = result.to_dict(), result.rows()
        if not self.to_stdout:
            show()
        if self.as_json:
            typer.echo(_json(data), nl=False)
        if self.as_csv:
            typer.echo(_csv(rows), nl=False)
        for path in self.output or ():
            try:
                if path.suffix == ".json":
                    write_whole(path, _json(data))
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
