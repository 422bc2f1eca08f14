"""Settings from a YAML file, with changes from the command line, read strictly.

What is not in the schema (``ctxext/training/sections.py``) is an error with a suggestion, what has the wrong type or is
out of range is an error that names the place and the value, and ``2e-5`` is a number (YAML 1.1 reads it as text).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.training.sections import Settings

__all__ = ["Settings", "checked_settings", "read_settings"]

# Where a setting stood in configs and in stored runs before it had its present place.
MOVED = {("training", "activation_checkpointing"): ("memory", "checkpointing")}


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a YAML file, then the changes from the command line.

    Args:
        path: of the file.
        overrides: ``--key value`` or ``--key=value``, the key dotted (``--extension.factor 8``) or, where only one
            section has it, its last part (``--factor 8``); several values make a list, no value means true.

    Raises:
        UnknownNameError: a key that does not exist, with a suggestion.
        InvalidParameterError: a missing, ill-typed or contradictory value, or a file that is not YAML.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise InvalidParameterError(f"Cannot read the settings in {str(path)!r}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise InvalidParameterError(f"{path} must hold settings by name, found {type(values).__name__}.")
    for key, value in _parsed(overrides):
        _put(values, key, value)
    return checked_settings(values, str(path))


def checked_settings(values: dict[str, Any], source: str) -> Settings:
    """Settings out of nested dictionaries, perhaps written by an earlier version.

    Args:
        values: by name.
        source: where they come from, to show.

    Raises:
        UnknownNameError: a key that does not exist, with a suggestion.
        InvalidParameterError: a missing, ill-typed or contradictory value.
    """
    for (section, name), (new_section, new_name) in MOVED.items():
        old, new = values.get(section), values.get(new_section) or {}
        if isinstance(old, dict) and isinstance(new, dict) and name in old:
            values[section] = {key: value for key, value in old.items() if key != name}
            values[new_section] = {new_name: old[name], **new}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise _explained(error, source) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with the numbers of YAML 1.2, in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for twice in {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is set twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The pairs of a command line, values read as YAML."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise InvalidParameterError(f"Expected --key value on the command line, found {word!r}.")
        key, given, text = word[2:].partition("=")
        texts = [text] if given else []
        while not given and words and not words[0].startswith("--"):
            texts.append(words.pop(0))
        found = [yaml.load(text, _Loader) for text in texts]
        yield key, found[0] if len(found) == 1 else found or True


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set one value in the nested dictionary of the file."""
    path = _full_path(key)
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise InvalidParameterError(f"{name} must hold settings by name, found {values!r}.")
    for other in {"factor": ["target_length"], "target_length": ["factor"]}.get(path[-1], []):
        values.pop(other, None)  # two ways to say the same: the command line's holds
    values[path[-1]] = value


def _full_path(key: str) -> list[str]:
    known = {".".join(path): path for path in _paths(Settings)}
    free = [prefix for prefix in known if key.startswith(f"{prefix}.") and prefix == "extension.parameters"]
    if key in known or free:
        return key.split(".")
    ending = [path for path in known.values() if path[-1] == key]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise InvalidParameterError(f"--{key} could be {' or '.join('--' + '.'.join(path) for path in ending)}.")
    raise UnknownNameError.of("setting", key, known if "." in key else {path[-1] for path in known.values()})


def _paths(section: type[BaseModel]) -> Iterator[list[str]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ([name, *rest] for rest in _paths(field.annotation))
        else:
            yield [name]


def _explained(error: ValidationError, path: str) -> UnknownNameError | InvalidParameterError:
    """The first unknown name with a suggestion; otherwise everything that is wrong, at once."""
    problems = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            return UnknownNameError.of(f"setting in {path}:", ".".join(place), _siblings(place))
        name = ".".join(place)
        if problem["type"] == "missing":
            problems.append(f"{name} is missing; set it in the file or with --{name}")
        else:
            said = problem["msg"].removeprefix("Value error, ")
            said = f"{said[:1].lower()}{said[1:]}"
            problems.append(f"{name}: {said}, found {problem['input']!r}" if name else said)
    return InvalidParameterError(f"{path}: {'; '.join(problems)}.")


def _siblings(place: Sequence[str]) -> list[str]:
    """The dotted names that exist where an unknown one was found."""
    section: Any = Settings
    for name in place[:-1]:
        section = typing.cast(Mapping[str, Any], section.model_fields)[name].annotation
    return [".".join([*place[:-1], name]) for name in section.model_fields]
