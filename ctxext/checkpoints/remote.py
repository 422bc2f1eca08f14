"""Load a saved checkpoint in programs that only take its path, where they trust the code next to it.

``ctxext.save(..., remote_code=True)`` writes ``REMOTE_CODE`` into the directory and names its classes in the config.
With ``trust_remote_code=True``, transformers calls ``from_pretrained`` of these classes.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.checkpoints.load import load
from ctxext.checkpoints.read import LOCATION, NO_FIELDS
from ctxext.checkpoints.source import REMOTE_MODULE, read_any_config
from ctxext.errors import IncompatibleError

REMOTE_CODE = '''"""Loads this checkpoint with its extension where it is trusted. It needs: pip install ctxext."""

from ctxext.checkpoints.remote import RemoteConfig, RemoteModel

__all__ = ["RemoteConfig", "RemoteModel"]
'''
# What the classes of transformers take for themselves.
OF_AUTO_CLASSES = ("trust_remote_code", "code_revision", "adapter_kwargs", "name_or_path", "_from_auto", "_commit_hash")


class RemoteConfig(PreTrainedConfig):  # type: ignore[misc]
    """Config that reads checkpoints that plain transformers refuses, and returns a config of the model's class."""

    @classmethod
    def from_pretrained(cls, place: Any, **arguments: Any) -> Any:
        """Read the config of a checkpoint as ``ctxext.load`` does.

        Raises:
            IncompatibleError: transformers is older than 5.19, which would load all models of the type by this code.
        """
        if Version(transformers.__version__) < Version("5.19"):
            raise IncompatibleError(
                f"transformers {transformers.__version__} would take the code beside {place} for all models of its "
                f"type. Use ctxext.load, or transformers 5.19 or newer."
            )
        unused = arguments.pop("return_unused_kwargs", False)
        location = {name: arguments.pop(name) for name in LOCATION if name in arguments}
        rest = {name: value for name, value in arguments.items() if name not in OF_AUTO_CLASSES}
        fields = {name: value for name, value in rest.items() if name not in NO_FIELDS}
        config = read_any_config(place, fields=fields, **location)
        config.auto_map = PreTrainedConfig.get_config_dict(place, **location)[0]["auto_map"]
        return (config, rest) if unused else config


class RemoteModel(PreTrainedModel):  # type: ignore[misc]
    """Model that is loaded by ctxext, and returned in the class that was saved or in another that was asked for."""

    @classmethod
    def from_pretrained(cls, place: Any, *_: Any, config: Any = None, **arguments: Any) -> Any:
        """Load a checkpoint as ``ctxext.load`` does."""
        given = {name: value for name, value in arguments.items() if name not in OF_AUTO_CLASSES and value is not None}
        if config is not None:  # the user may have changed it
            where = {name: given[name] for name in LOCATION if name in given}
            read = RemoteConfig.from_pretrained(place, **where).to_dict()
            now = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
            given = {name: value for name, value in now.items() if read.get(name) != value} | given
        asked = cls._auto_class  # transformers has just noted here which of its classes calls
        kinds = _built(asked, config) if asked and config is not None else ()
        if kinds and not {kind.__name__ for kind in kinds} & {*(config.architectures or ())}:
            given["auto_class"] = asked
        return load(place, **given)


def _built(name: str, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes that an auto class of transformers builds from a config; none for other names."""
    kinds = getattr(getattr(transformers, name), "_model_mapping", {}).get(type(config), ())
    return tuple(kinds) if isinstance(kinds, tuple | list) else (kinds,)


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Return the classes of transformers that load a model, each with its replacement in the checkpoint's module.

    Raises:
        IncompatibleError: no ``AutoModel`` of transformers loads it.
    """
    built = {name: _built(name, model.config) for name in dir(transformers) if name.startswith("AutoModel")}
    names = [name for name, kinds in built.items() if kinds]
    if not any(type(model) in kinds for kinds in built.values()):
        raise IncompatibleError(
            f"remote_code=True: no AutoModel of transformers loads a {type(model).__name__}. Save it without, and load "
            f"it by ctxext.load."
        )
    return {"AutoConfig": f"{REMOTE_MODULE}.RemoteConfig"} | dict.fromkeys(names, f"{REMOTE_MODULE}.RemoteModel")
