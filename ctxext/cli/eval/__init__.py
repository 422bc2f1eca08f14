"""``ctxext eval``: one command per file in this folder, the function with the same name as its file.

Everything here is imported to print the help of ``ctxext``, so heavy imports live inside the commands.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

from ctxext.cli.options import StrictCommand

__all__ = ["eval_app"]

eval_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@eval_app.callback()
def main() -> None:
    """Measure the value of a longer context against truncation.

    [bold]Example[/]: ctxext eval compare Llama-3-8B --text book.txt -o report
    """


for _found in pkgutil.iter_modules(__path__):
    if _found.name not in ("asking", "common"):  # the drivers of the commands
        _module = importlib.import_module(f"{__name__}.{_found.name}")
        eval_app.command(_found.name.replace("_", "-"), cls=StrictCommand)(getattr(_module, _found.name))
