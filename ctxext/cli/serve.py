"""``ctxext serve``: an OpenAI-compatible server of an extended checkpoint."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from ctxext.cli.options import (
    COMPILE_SAYS,
    ExtensionOptions,
    SourceOptions,
    grouped,
    option,
    option_group,
    token_option,
)
from ctxext.errors import InvalidParameterError, install_line, require_package
from ctxext.progress import terminal


@option_group
class ServerOptions:
    """Address of the server, and key of its clients."""

    host: str = option("Address to listen on; 0.0.0.0 for every network.", default="127.0.0.1")
    port: int = option("Port to listen on; 0 for any free port.", default=8000, min=0, max=65535)
    api_key: str | None = option(
        "Answer only clients with this key.", envvar="CTXEXT_API_KEY", show_default="none: answer all clients"
    )
    cors: list[str] | None = option(
        "Let web pages of this origin read answers: http://localhost:3000, or * for all. Repeatable.",
        metavar="ORIGIN",
        show_default="none",
    )
    name: str | None = option("Name of the model for clients.", show_default="CHECKPOINT as given")
    continuous_batching: bool = option(
        "Answer several requests in each pass of the model.", "--continuous-batching", default=False
    )
    keep_tokens: int | None = token_option(
        "Tokens of prompts and answers that are kept for requests that begin alike; 0 for none.",
        show_default="2 windows",
        least=0,
    )
    compile: bool = option(COMPILE_SAYS, "--compile", default=False)
    cached_tokens: int | None = token_option(
        "Tokens in the cache of continuous batches.",
        show_default="the free memory of a GPU, 8 windows on a CPU",
        least=1,
    )

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise InvalidParameterError("--api-key is empty. Give a key, or leave it out to answer all clients.")
        alone = {"--compile": self.compile, "--keep-tokens": self.keep_tokens is not None}
        for flag in [flag for flag, given in alone.items() if given and self.continuous_batching]:
            raise InvalidParameterError(f"{flag} is for requests one by one. Leave it out, or --continuous-batching.")
        if self.cached_tokens is not None and not self.continuous_batching:
            raise InvalidParameterError("--cached-tokens is for --continuous-batching. Leave it out, or give both.")


@grouped
def serve(
    *,
    source: SourceOptions,
    extension: ExtensionOptions,
    server: ServerOptions,
) -> None:
    """Serve a checkpoint to clients of OpenAI's API: chat, completions, responses and models, streamed or not.

    Every method can be served. A request that exceeds the window is refused; nothing is cut.

    [bold]Example[/]: ctxext serve Llama-3-8B --method self_extend --factor 4
    """
    for package in ("fastapi", "uvicorn", "openai"):
        require_package(package, "serve", "ctxext serve needs")
    if Version(version("transformers")).release < (5, 23):
        raise InvalidParameterError(
            f"ctxext serve needs transformers 5.23 or newer, and {version('transformers')} is installed. Run "
            f"{install_line('serve')}."
        )
    from ctxext.serving.gate import LOCAL
    from ctxext.serving.load import load_served
    from ctxext.serving.server import application, bound, require_batches
    from ctxext.serving.server import serve as answer

    # The cheapest step first: take the port, load without weights, check that batches are possible, load the weights.
    listening = bound(server.host, server.port)
    loading = source.loading | extension.arguments() | {"name": server.name}
    served = load_served(source.checkpoint, weights=False, **loading)
    if server.continuous_batching:
        require_batches(served.checkpoint.model)
    if not served.checkpoint.has_weights:
        served = load_served(source.checkpoint, tokenizer=served.checkpoint.tokenizer, **loading)
    app = application(
        served,
        key=server.api_key,
        host=server.host,
        continuous_batching=server.continuous_batching,
        cached_tokens=server.cached_tokens,
        keep_tokens=server.keep_tokens,
        compiles=server.compile,
        origins=server.cors or (),
    )
    console = terminal()
    for note in served.notes:
        console.print(note, style="yellow", soft_wrap=True)
    if server.api_key is None and not LOCAL.fullmatch(server.host):
        console.print(f"{server.host} without --api-key: everybody who reaches this port is answered.", style="yellow")
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    method, dtype, stored = (served.facts[fact] for fact in ("method", "dtype", "stored_dtype"))
    kept = " (the checkpoint holds float32; --dtype fp32 keeps it)" if stored == "float32" != dtype else ""
    console.print(f"Serving {served.name} at http://{host}:{port}/v1", soft_wrap=True)
    console.print(
        f"  {method or 'not extended'}, a window of {served.window} tokens, in {dtype}{kept}; Ctrl-C ends it",
        soft_wrap=True,
    )
    answer(app, listening)
