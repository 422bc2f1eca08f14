"""``python -m ctxext``: the command line."""

from ctxext.cli import app

app(prog_name="ctxext")
