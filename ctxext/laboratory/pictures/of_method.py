"""The picture of a method: which kind it is follows from the method's own form, so that a new file has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from ctxext.checkpoints.inspect import rope_of_checkpoint
from ctxext.checkpoints.load import load, meta_model, model_class
from ctxext.checkpoints.source import checked_path, read_any_config
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.evaluation.readings import known_trained_length, name_for
from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from ctxext.laboratory.pictures.attention import (
    QUERIES,
    Looks,
    attention_of,
    by_distance,
    edges_of,
    picture_of_attention,
)
from ctxext.laboratory.pictures.bias import bias_of_encoding, bias_of_slopes, picture_of_bias
from ctxext.laboratory.pictures.buckets import picture_of_buckets
from ctxext.laboratory.pictures.picture import Picture
from ctxext.laboratory.pictures.positions import picture_of_positions
from ctxext.laboratory.pictures.rotation import picture_of_rotation
from ctxext.laboratory.pictures.rows import picture_of_rows, rows_seen
from ctxext.laboratory.pictures.sentence import depends_on_text, picture_of_sentence, sentence_seen, toy
from ctxext.methods import BiasMethod, BucketMethod, EncodingMethod, Method, RopeMethod, TableMethod, saved_class
from ctxext.methods.encoding import Encoding
from ctxext.methods.parameters import checked_tokens
from ctxext.methods.pi import PI
from ctxext.methods.remap import RemapMethod
from ctxext.patching import patch, unpatch
from ctxext.saved import saved_extension
from ctxext.spec import LLAMA, AlibiSpec, BucketSpec, EncodingSpec, RopeSpec
from ctxext.surgery.encodings import spec_of
from ctxext.surgery.lookups import table_of
from ctxext.surgery.rebuild import rotaries
from ctxext.surgery.tables import PositionTable, twins_of
from ctxext.surgery.texts import text_of
from ctxext.surgery.wrappers import base_model

PLAIN = "rope"
"""What stands for rotation as it is, which is no method."""

SENTENCE = "the cat saw the dog . the dog saw a cat . the cat ran"
LONGEST = 1024  # tokens of a text that attention is looked at in, unless more are asked for
UNTRAINED = "as it begins, untrained"
# What is drawn where there is no checkpoint, beside LLAMA.
SMALL = EncodingSpec(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=16, num_layers=1, trained_length=512)
T5 = BucketSpec(buckets=32, max_distance=128, trained_length=512)
POSITIONS, TOKENS = 128, 16  # of a table, and of a matrix whose cells hold their numbers


@dataclass(frozen=True, kw_only=True)
class ShownOn:
    """What a method is shown on.

    Args:
        checkpoint: a directory or a name on the hub; None for an example of the method's kind.
        text: what is read.
        layer: attention layer, from 0 on, where one has to be chosen.
        length: tokens of the text that are read; None for as many as there are, at most 1,024.
        trained_length: tokens that the weights were trained for, where the config does not say so.
        trust: run Python code that the checkpoint brings along.

    Raises:
        InvalidParameterError: for a length that is no number of tokens.
    """

    checkpoint: str | None = None
    text: str | None = None
    layer: int = 0
    length: int | None = None
    trained_length: int | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "trained_length"):
            if getattr(self, name) is not None:
                checked_tokens(name, getattr(self, name))

    @property
    def name(self) -> str:
        """What a title calls the checkpoint."""
        return Path(self.checkpoint).name if self.checkpoint else ""


def picture_of(method: Method | None, subject: ShownOn) -> Picture:
    """The picture of a method, of the kind that its form asks for.

    Args:
        method: what is shown; None for rotation as it is.
        subject: what it is shown on.

    Raises:
        CheckpointError: there is no such checkpoint.
        IncompatibleError: the checkpoint has nothing that the method changes.
        InvalidParameterError: what was asked for does not fit the method or the text.
    """
    if subject.length is not None and subject.text is None:
        raise InvalidParameterError(f"--length {subject.length} is of the --text that is read; give one.")
    if isinstance(method, EncodingMethod):
        return _of_encoding(method, subject)
    if subject.text is not None:
        return _of_attention(method, subject)
    lives = _lives(subject)
    if lives == "table" and method is not None:
        return _of_table(method, subject)
    if isinstance(method, BiasMethod) and (lives == "elsewhere" or not isinstance(method, RopeMethod)):
        return _of_slopes(method, subject)
    if isinstance(method, RemapMethod):
        example = replace(LLAMA, trained_length=subject.trained_length or TOKENS)
        return picture_of_positions([method], _rope(subject, example))
    if method is None or isinstance(method, RopeMethod):
        shown = PI(factor=1.0) if method is None else method
        label = PLAIN if method is None else name_for(method)
        example = replace(LLAMA, trained_length=subject.trained_length or LLAMA.trained_length)
        return picture_of_rotation(shown, _rope(subject, example), label=label, name=subject.name)
    if isinstance(method, TableMethod):
        return _of_table(method, subject)
    if isinstance(method, BucketMethod):
        return picture_of_buckets(method, _buckets(subject), label=name_for(method), name=subject.name)
    raise InvalidParameterError(f"Method {method.name!r} is of no kind that has a picture.")


def _buckets(subject: ShownOn) -> BucketSpec:
    if subject.checkpoint is None:
        return replace(T5, trained_length=subject.trained_length or T5.trained_length)
    config = text_of(_config(subject))
    buckets = getattr(config, "relative_attention_num_buckets", None)
    most = getattr(config, "relative_attention_max_distance", None)
    if not isinstance(buckets, int) or not isinstance(most, int):
        raise IncompatibleError(f"The config of {subject.checkpoint} names no buckets of relative distances.")
    length = subject.trained_length or getattr(config, "n_positions", None) or T5.trained_length
    return BucketSpec(buckets, most, length)


def _lives(subject: ShownOn) -> Literal["table", "rotation", "elsewhere"] | None:
    """Where the positions of the checkpoint live; None without one."""
    if subject.checkpoint is None:
        return None
    model = meta_model(_config(subject), trust_remote_code=subject.trust)
    if any(True for _ in rotaries(model)):
        return "rotation"
    twins = twins_of(model)
    return "table" if twins.has_learned or twins.has_sinusoids else "elsewhere"


def _rope(subject: ShownOn, example: RopeSpec) -> RopeSpec:
    if subject.checkpoint is None:
        return example
    return rope_of_checkpoint(
        subject.checkpoint, trained_length=subject.trained_length, trust_remote_code=subject.trust
    )


def _loaded(subject: ShownOn, method: Method | None = None, **how: Any) -> PreTrainedModel:
    """The checkpoint, extended by a method or as it was saved; in float32."""
    how |= {"trust_remote_code": True} if subject.trust else {}
    model = load(str(subject.checkpoint), method, dtype=torch.float32, **how)
    found: PreTrainedModel = base_model(model).eval()
    return found


def _config(subject: ShownOn) -> Any:
    checked_path(str(subject.checkpoint), {})
    return read_any_config(str(subject.checkpoint), trust_remote_code=subject.trust)


# Biases that have a slope each


def _of_slopes(method: BiasMethod, subject: ShownOn) -> Picture:
    heads, length = SMALL.num_heads, subject.trained_length or SMALL.trained_length
    if subject.checkpoint is not None:
        config = _config(subject)
        model = meta_model(config, trust_remote_code=subject.trust)
        heads = text_of(config).num_attention_heads
        length = known_trained_length(model, subject.trained_length)
    found = bias_of_slopes(method, AlibiSpec(heads, length))
    return picture_of_bias(found, label=method.name, saved=method.to_dict(), name=subject.name)


# Tables of positions


def _of_table(method: Method, subject: ShownOn) -> Picture:
    if subject.checkpoint is None:
        assert isinstance(method, TableMethod)
        trained = _waves(subject.trained_length or POSITIONS)
        indices, weights = method.rows(len(trained), method.target_length(len(trained)))
        rows = (weights[..., None] * trained[indices]).sum(1)
        said = f"What {name_for(method)} makes of a table of {len(trained)} rows (of sinusoids, as an example)"
    else:
        model = _loaded(subject, method, trained_length=subject.trained_length)
        name, rows = _longest_table(model)
        unpatch(model)
        table = next(one for one in _tables(model) if one.name == name)
        trained = _values(model, table)[: subject.trained_length]
        said = f"{subject.name}: what {name_for(method)} makes of the {len(trained)} rows of {name}"
    return picture_of_rows(rows_seen(rows, trained), title=said, kind="table", saved=method.to_dict())


def _waves(length: int) -> Float[Tensor, "length size"]:
    added = Sinusoidal().build(SMALL).added(torch.arange(length)[None])
    assert added is not None
    return added[0].double()


def _tables(model: PreTrainedModel) -> list[PositionTable]:
    twins = twins_of(model)
    return twins.tables if twins.has_learned else twins.sinusoids


def _values(model: PreTrainedModel, table: PositionTable) -> Float[Tensor, "rows size"]:
    return table_of(model, table.name).detach()[table.first :].double().cpu()


def _longest_table(model: PreTrainedModel) -> tuple[str, Float[Tensor, "rows size"]]:
    table = max(_tables(model), key=lambda one: one.positions)
    return table.name, _values(model, table)


# Encodings that bring a module


def _of_encoding(method: EncodingMethod, subject: ShownOn) -> Picture:
    if depends_on_text(method, SMALL):
        return _of_sentence(method, subject)
    if subject.text is not None:
        return _of_attention(method, subject)
    if method.form == "added":
        return _of_added(method, subject)
    torch.manual_seed(0)
    if subject.checkpoint is None:
        spec = replace(SMALL, trained_length=subject.trained_length or SMALL.trained_length)
        encoding, state, layer = method.build(spec), UNTRAINED, ""
    else:
        model, method, state = _with_encoding(method, subject)
        encodings = [module for module in model.modules() if isinstance(module, Encoding)]
        if not 0 <= subject.layer < len(encodings):
            raise InvalidParameterError(
                f"There is no layer {subject.layer} with an encoding of its own: this model has {len(encodings)}."
            )
        encoding = encodings[subject.layer].double()
        spec = spec_of(model, known_trained_length(model, subject.trained_length))
        layer = f", layer {subject.layer}" if len(encodings) > 1 else ""
    state = state if any(True for _ in encoding.parameters()) else ""
    found = bias_of_encoding(encoding, spec, method.target_length(spec.trained_length))
    name = f"{subject.name}{layer}"
    return picture_of_bias(found, label=method.name, saved=method.to_dict(), name=name, state=state)


def _with_encoding(method: EncodingMethod, subject: ShownOn) -> tuple[PreTrainedModel, EncodingMethod, str]:
    """The checkpoint as it was trained with the encoding, or else as it begins to be."""
    saved = (saved_extension(_config(subject), str(subject.checkpoint)) or {}).get("method") or {}
    if saved.get("method") == method.name:
        known = saved_class(method.name).from_dict(saved)
        assert isinstance(known, EncodingMethod)
        return _loaded(subject), known, ""
    return _loaded(subject, method, trained_length=subject.trained_length), method, UNTRAINED


def _of_added(method: EncodingMethod, subject: ShownOn) -> Picture:
    """Vectors that are added: a checkpoint's own table where it has one, else those of the method."""
    if _lives(subject) == "table":
        model = _read(subject)
        name, rows = _longest_table(model)
        said = f"{subject.name}: the {len(rows)} rows of {name}, as they were trained"
        return picture_of_rows(rows_seen(rows, rows), title=said, kind="table", saved=method.to_dict())
    torch.manual_seed(0)
    if subject.checkpoint is None:
        spec, state = replace(SMALL, trained_length=subject.trained_length or POSITIONS), UNTRAINED
        encoding, of = method.build(spec), "an example"
    else:
        model, method, state = _with_encoding(method, subject)
        spec, of = spec_of(model, known_trained_length(model, subject.trained_length)), subject.name
        encoding = next(module for module in model.modules() if isinstance(module, Encoding))
    target = method.target_length(spec.trained_length)
    with torch.no_grad():
        added = encoding.added(torch.arange(target)[None])
    assert added is not None
    state = f", {state}" if state and any(True for _ in encoding.parameters()) else ""
    said = f"{method.name}: {of}, a vector for each of {target:,} positions, {spec.trained_length:,} trained{state}"
    seen = rows_seen(added[0], added[0, : spec.trained_length])
    return picture_of_rows(seen, title=said, kind="table", saved=method.to_dict())


def _read(subject: ShownOn) -> PreTrainedModel:
    """The checkpoint as it is."""
    config = _config(subject)
    found: PreTrainedModel = model_class(config).from_pretrained(str(subject.checkpoint), dtype=torch.float32)
    return found.eval()


def _of_sentence(method: EncodingMethod, subject: ShownOn) -> Picture:
    torch.manual_seed(0)
    if subject.checkpoint is None:
        names = tuple((subject.text or SENTENCE).split())
        if not names:
            raise InvalidParameterError("--text holds no word. Give a sentence.")
        words = list(dict.fromkeys(names))
        model = patch(toy(len(words), subject.trained_length or 64), method)
        tokens, of = (
            torch.tensor([[words.index(name) for name in names]]),
            "an untrained toy in which equal words attract",
        )
    else:
        model, method, state = _with_encoding(method, subject)
        tokens, tokenizer = _tokens(subject, subject.text or SENTENCE)
        pieces = tokenizer.convert_ids_to_tokens(tokens[0].tolist())
        names = tuple(piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "⏎").strip() or "·" for piece in pieces)
        of = subject.name + (f", {state}" if state else "")
    found = sentence_seen(model, tokens, names, subject.layer)
    return picture_of_sentence(found, label=method.name, saved=method.to_dict(), of=of)


def _tokens(subject: ShownOn, text: str) -> tuple[Tensor, Any]:
    """A text as the checkpoint reads it, and the tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(subject.checkpoint), trust_remote_code=subject.trust)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{subject.checkpoint} has no tokenizer to read --text with: {error}") from error
    found: Tensor = tokenizer(text, return_tensors="pt").input_ids
    if not found.shape[1]:
        raise InvalidParameterError("--text holds no token. Give a sentence, or a file with one.")
    return found, tokenizer


# Attention by distance


def _of_attention(method: Method | None, subject: ShownOn) -> Picture:
    assert subject.text is not None
    if subject.checkpoint is None:
        raise InvalidParameterError(
            "--text is read by a checkpoint here, to show how far back its heads look: give one with --model."
        )
    if method is None:
        raise InvalidParameterError(
            f"With --text the attention before and after an extension is drawn, and {PLAIN!r} is none. Name a method."
        )
    if subject.length is not None and subject.length < 1:
        raise InvalidParameterError(f"--length must be a number of tokens, at least 1, found {subject.length}.")
    tokens = _tokens(subject, subject.text)[0][:, : subject.length or LONGEST]
    if subject.length is not None and tokens.shape[1] < subject.length:
        raise InvalidParameterError(
            f"--length {subject.length}: the text has {tokens.shape[1]} tokens. Give a longer one."
        )
    last, edges = min(QUERIES, tokens.shape[1]), edges_of(tokens.shape[1])
    model = _loaded(subject, method, trained_length=subject.trained_length)
    after = by_distance(attention_of(model, tokens, last), edges)
    trained = int(base_model(model).config.ctxext["trained_length"])
    unpatch(model)
    before = by_distance(attention_of(model, tokens, last), edges)
    found = Looks(trained, tokens.shape[1], edges, before, after)
    return picture_of_attention(found, label=name_for(method), name=subject.name, saved=method.to_dict())
