"""Mistakes that can be seen before torch, transformers or a checkpoint are loaded, which takes seconds to minutes."""

from __future__ import annotations

import math
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ctxext.errors import CheckpointError, InvalidParameterError, no_reach, refuse_unknown
from ctxext.files import StrPath, gguf_at, is_choice, nearest_name, refuse_destination, refuse_missing, refuse_no_config
from ctxext.quantities import method_said, parameters_said, parse_budget, parse_bytes
from ctxext.registry import listed_methods, method_names, runtime_names

BESIDE_METHODS = {"auto", "rope"}  # names that are given like that of a method, and have answers of their own
# Kinds of devices that torch has names of.
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "maia", "xla", "meta")


def refuse_mistakes(given: Mapping[str, Any]) -> None:
    """Refuse options that are wrong with every checkpoint, before torch, transformers or a checkpoint are loaded.

    Args:
        given: values of a command's options by name; a name means the same in every command.

    Raises:
        CtxextError: the first mistake.
    """
    for name, check in CHECKS.items():
        value = given.get(name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                check(each)
    method, parameters = given.get("method"), parameters_said(given.get("param") or ())
    if isinstance(method, str):  # a parameter that is an option too is refused as such
        if "param" in given:
            refuse_parameters_inside(method, "--param {}=...")
        refuse_unknown_parameters(method, [name for name in parameters if name not in given])
        reach = [given.get(name, "elsewhere") for name in ("factor", "target_length", "param")]
        if not isinstance(given.get("length"), int):  # a list of lengths to read is a reach, a prompt's length is not
            reach.append(given.get("length"))
        if all(value in (None, [], ()) for value in reach) and listed_methods().get(method, {}).get("needs a reach"):
            raise no_reach(method)


def refuse_unknown_method(words: str) -> None:
    """Refuse a method, perhaps with parameters, that is neither in the folder of methods nor registered.

    Raises:
        UnknownNameError: with the nearest name of a method, or of a parameter of it.
        InvalidParameterError: a parameter that is not KEY=VALUE, or a choice.json that is not there.
    """
    if is_choice(words) and not Path(words).is_file():
        raise InvalidParameterError(f"Cannot read the method in {words!r}: no such file.{nearest_name(Path(words))}")
    if words in BESIDE_METHODS or is_choice(words):
        return
    name, parameters = method_said(words)
    known = {*method_names(), *getattr(sys.modules.get("ctxext.methods"), "METHODS", ())}
    refuse_unknown("method", [name], known)
    refuse_unknown_parameters(name, parameters)


def refuse_unknown_parameters(method: str, parameters: Iterable[str]) -> None:
    """Raise ``UnknownNameError`` for the first of some parameters that a method of ctxext's own does not have."""
    if parameters and method in listed_methods():
        refuse_unknown(f"{method} parameter", parameters, listed_methods()[method]["parameters"])


def refuse_parameters_inside(words: str, way: str) -> None:
    """Refuse a method with its parameters in one text, where they are given apart; ``way`` says how one of them is.

    Raises:
        InvalidParameterError: with the name and the parameters.
    """
    if is_choice(words):
        return
    name, parameters = method_said(words)
    if parameters:
        apart = ", ".join(way.format(parameter) for parameter in parameters)
        raise InvalidParameterError(
            f"{words!r} is not a method here, where parameters are apart: give {name}, and {apart}."
        )


def _refuse_unknown_runtime(name: str) -> None:
    known = {*runtime_names(), *getattr(sys.modules.get("ctxext.runtimes"), "RUNTIMES", ())}
    refuse_unknown("export target", [name], known)


def _refuse_unknown_device(name: str) -> None:
    if name.partition(":")[0] not in DEVICES:
        raise InvalidParameterError(
            f"Device {name!r} cannot be used here: there is no such kind. Give another, such as cpu or cuda:0."
        )


def _refuse_no_origin(origin: str) -> None:
    if origin != "*" and not re.fullmatch(r"https?://[^/?#]+", origin):
        raise InvalidParameterError(f"{origin!r} is no origin of web pages, such as http://localhost:3000, or *.")


def _refuse_shrinking(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise InvalidParameterError(f"factor must be a finite number, at least 1, found {factor}.")


def refuse_no_checkpoint(place: str) -> None:
    """Refuse a checkpoint that is neither a path here nor in the hub's cache, where the hub does not answer.

    Raises:
        CheckpointError: with the name and the reason.
    """
    path = Path(place)
    if place.endswith(".gguf") and not path.is_file():
        raise CheckpointError(f"There is no file {place}.{nearest_name(path)}")
    refuse_missing(place)
    if path.exists():
        refuse_no_config(path)
        return
    from huggingface_hub import constants

    cached = f"models--*{place.replace('/', '--')}"
    if any(Path(constants.HF_HUB_CACHE).glob(cached)):
        return
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why_unreachable(constants.ENDPOINT)
    if reason:
        raise CheckpointError(
            f"There is no directory {place} here.{nearest_name(path)} The hub cannot be asked for a model of "
            f"this name: {reason}."
        )


def refuse_gguf(path: StrPath) -> None:
    """Refuse a GGUF file in the place of a checkpoint."""
    if gguf_at(path):
        raise CheckpointError(
            f"{path} is a GGUF file. Give the checkpoint that it was converted from; what is printed for llama.cpp "
            f"then holds for the file. To write an extension into a copy of it, give a method and --gguf {path} "
            f"OUT.gguf."
        )


def text_tokenizer(given: Any) -> Any:
    """Return a tokenizer itself, and the tokenizer of a processor.

    Raises:
        InvalidParameterError: if it is neither, but the name of one perhaps.
    """
    text = given if hasattr(given, "model_max_length") else getattr(given, "tokenizer", None)
    if not hasattr(text, "model_max_length"):
        way = f" Load it: AutoTokenizer.from_pretrained({given!r})." if isinstance(given, str) else ""
        raise InvalidParameterError(
            f"tokenizer must be a tokenizer or processor of transformers, found {given!r:.80}.{way}"
        )
    return text


def why_unreachable(url: str) -> str | None:
    """Return why nothing answers at the address of a URL, or at the proxy for it, within a second; None if it does."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("http:// or a host is missing")
        proxy = None if proxy_bypass(parts.hostname) else getproxies().get(parts.scheme)
        asked = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else parts
        port = asked.port or {"https": 443}.get(asked.scheme, 80)
        with socket.create_connection((asked.hostname or "", port), timeout=1):
            return None
    except OSError as error:
        return f"{asked.netloc} does not answer ({error.strerror or error})"
    except ValueError as error:
        return f"{url} is not an address such as http://127.0.0.1:8000 ({error})"


CHECKS: dict[str, Callable[[Any], object]] = {  # typer before 0.29 gives a path as a string
    "method": refuse_unknown_method,
    "factor": _refuse_shrinking,
    "to": _refuse_unknown_runtime,
    "cors": _refuse_no_origin,
    "device": _refuse_unknown_device,
    "budget": parse_budget,
    "memory": parse_bytes,
    "destination": refuse_destination,
    "save": refuse_destination,
    **dict.fromkeys(("source", "checkpoint", "model", "reference"), lambda place: refuse_no_checkpoint(str(place))),
}
