"""The command line: ``ctxext``. It calls the library and is called by nobody."""
