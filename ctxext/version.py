"""The version, and the command that installs ctxext: its own file, so that every room may ask for it."""

__version__ = "0.1.0"
INSTALL = "pip install -e '.[{}]'"
"""Command that installs an extra, where no package index has ctxext yet. Afterwards: ``pip install 'ctxext[{}]'``."""
PLACE = " in the clone of ctxext"
"""Where it is run; empty afterwards."""
