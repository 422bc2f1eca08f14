"""``python -m ctxext``: the command line."""

from ctxext.cli.app import app

app(prog_name="ctxext")
