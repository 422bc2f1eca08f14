"""Low-rank adapters that close the gap at long context: with normalisation and embedding weights trained as well.

LoRA on the linear layers alone leaves most of what full fine-tuning gains at long context on the table (Llama 2 7B at
32K tokens: perplexity 11.44 against 8.08); with norms and embeddings trained too, 0.1 percent of the weights more
there, it reaches 8.12.

Source: Chen et al., arXiv:2309.12307 (LongLoRA), section 3.3 and table 2.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.checkpoints.adapt import keep_biases, put_adapter
from ctxext.checkpoints.adapters import keep_extension, read_extension
from ctxext.core.edits import Edits
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods.encoding import Encoding
from ctxext.probe.code import own_bases, source_of

Target = Literal["attention", "mlp"]
# PEFT ties the head to a trained embedding only where this name, or lm_head, is among modules_to_save, although it then
# asks the model itself which module that is. A name that no module has does no harm.
TIED_NAME = "embed_tokens"
# Decoder layers are numbered: model.layers.0.self_attn.q_proj
IN_A_LAYER = re.compile(r"\.\d+\.")
# Names of an expert's linear layers before all experts became one tensor. PEFT takes targets of these names for the
# experts of a mixture, when it loads too, and so leaves out shared experts and dense layers.
EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
# A weight that is handed over or multiplied whole. BLOOM slices weights only for its setting ``slow_but_exact``, off.
WEIGHT_READ = re.compile(r"(?<!isinstance\()\bself\.(\w+)\.weight(?=\s*[,)@\n])")


def attach_lora(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    targets: Sequence[Target] = ("attention", "mlp"),
    norms: bool = True,
    embeddings: bool = True,
    whole: bool = False,
) -> Any:
    """Wrap a model with a LoRA adapter, patched or not, ready to be trained.

    Trained weights are held in float32: an update of 1e-4 of a weight would be rounded away in bfloat16. The outputs
    of the trained norms and embeddings are cast back to the model's dtype, so that training computes as the finished
    model will. Train under autocast of that dtype (``TrainingArguments(bf16=True)``). However the
    adapter is saved, the extension of a patched model is saved with it. The weights that a method brought along (an
    encoding that replaces rotation) are trained whole.

    Args:
        rank: Rank of the updates, at least 1.
        alpha: updates are scaled by ``alpha / rank``.
        dropout: Dropout of the updates' input, from 0 to below 1.
        targets: Linear layers that get an update; ``mlp`` means all outside attention, and experts, which a mixture
            of experts holds as one tensor. Left out are routers whose class is the model's own, and layers
            whose weights its code multiplies by itself (``out_proj`` of a state space).
        norms: train all normalisation weights themselves.
        embeddings: train the token embedding itself. Where the head shares its weights it goes on sharing them, also
            in the saved and the merged model.
        whole: train the linear layers in ``targets``, and experts, themselves, as full fine-tuning does, instead of
            updates of low rank; ``rank``, ``alpha`` and ``dropout`` then say nothing. The adapter holds all of their
            weights.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        IncompatibleError: no linear layers of that kind were found, or ``dropout`` for experts that are one tensor.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    subject = Subject.of(model)
    causal = subject.model
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    trained = set(norm_layers(causal)) if norms else set()
    if embeddings:
        trained |= {name for name, module in causal.named_modules() if module is embedding}
    trained |= set(encodings(causal))
    layers = linear_layers(causal, targets)
    experts = expert_weights(causal) if "mlp" in targets else []
    if whole:
        endings, of_experts = (tuple(f".{ending}" for ending in part) for part in (layers, experts))
        trained |= {n for n, module in causal.named_modules() if _is_linear(module) and f".{n}".endswith(endings)}
        trained |= {n.rpartition(".")[0] for n, _ in causal.named_parameters() if n.endswith(of_experts)}
        experts = []
    named_so = [name for name in layers if experts and name.rpartition(".")[2] in EXPERT_LAYERS]
    if named_so and getattr(causal, "is_quantized", False):
        raise IncompatibleError(
            f"{type(causal).__name__} is quantised: PEFT adapts {named_so[0]} beside experts that are one tensor in "
            f"floating point only. Leave 'mlp' out of targets."
        )
    if experts and dropout:
        raise IncompatibleError(
            f"dropout={dropout}: PEFT adapts experts that are one tensor ({experts[0]}) without dropout only. Set it "
            f"to 0, or leave 'mlp' out of targets."
        )
    tied = embeddings and head is not None and head.weight is embedding.weight
    config = LoraConfig(
        task_type="CAUSAL_LM" if causal.can_generate() else None,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=DUMMY_TARGET_MODULES if whole else [name for name in layers if name not in named_so],
        target_parameters=[*experts, *(f"{name}.weight" for name in named_so)] or None,
        modules_to_save=sorted({*_endings(causal, trained), *([TIED_NAME] if tied else [])}) or None,
        ensure_weight_tying=tied,
    )
    dtype = causal.dtype
    # The adapter of a plan has no memory either, as its model.
    with causal.device if causal.device.type == "meta" else contextlib.nullcontext():
        adapted = get_peft_model(model, config)
    keep_biases(adapted)
    # For good: the model may be extended otherwise before it is saved.
    keep_extension(replace(subject, wrappers=(adapted, *subject.wrappers)), Edits())
    for module in adapted.modules():
        if _is_trained_whole(module):
            module.register_forward_hook(partial(_in_dtype, dtype))
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return adapted


def reattach_lora(model: nn.Module, directory: Path) -> Any:
    """Wrap a model with an adapter that was saved with its extension.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        CheckpointError: if it is extended otherwise, or the adapter was saved without its extension or encoding.
    """
    return put_adapter(model, read_extension(directory), Edits(), drawn=True)


def linear_layers(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """Return the names, for PEFT, of the linear layers inside the decoder layers: ``q_proj``, ``mlp.c_proj``, ...

    Raises:
        IncompatibleError: the model has no layer of a kind in ``targets``.
    """
    layers: dict[str, set[str]] = {"attention": set(), "mlp": set()}
    for name, module in model.named_modules():
        if _is_linear(module) and IN_A_LAYER.search(name):
            parent, _, last = name.rpartition(".")
            holder = model.get_submodule(parent)
            kind: Any = type(holder)  # mypy thinks that a class of modules has no hash
            if last not in _read_past(kind) and not _puts_out_more(module, holder):
                layers["attention" if "att" in f"{parent}{kind.__name__}".lower() else "mlp"].add(name)
    chosen: set[str] = set()
    for target in targets:
        if not layers[target] and not (target == "mlp" and expert_weights(model)):
            raise IncompatibleError(f"{type(model).__name__} has no linear layers of the kind {target!r} to adapt.")
        chosen |= layers[target]
    return _endings(model, chosen)


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names, for PEFT, of weights that hold a matrix for each expert: ``experts.down_proj``, ..."""
    names = [name for name, weight in model.named_parameters() if weight.ndim == 3 and IN_A_LAYER.search(name)]
    return sorted({".".join(name.split(".")[-2:]) for name in names if "expert" in name})


def norm_layers(model: nn.Module) -> list[str]:
    """Return the full names of normalisation layers: no inner layers, vectors for weights, "norm" in the class name."""
    return [
        name
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and not list(module.children())
        and {weight.dim() for weight in module.parameters()} == {1}
    ]


def encodings(model: nn.Module) -> list[str]:
    """Return the full names of a method's encodings that have weights."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, Encoding) and next(module.parameters(), None) is not None
    ]


def merged(adapted: Any) -> PreTrainedModel:
    """Merge the adapter into the weights and return the model without the adapter, each weight in its earlier dtype.

    transformers keeps some weights of a model of 16 bits in float32 (routers of experts), which stay.
    """
    dtypes = {
        name: {key: tensor.dtype for key, tensor in module.original_module.state_dict().items()}
        for name, module in adapted.base_model.model.named_modules()
        if _is_trained_whole(module)
    }
    model: PreTrainedModel = adapted.merge_and_unload()
    for name, of_module in dtypes.items():
        for key, tensor in model.get_submodule(name).state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(of_module[key])
    return model


def _is_trained_whole(module: nn.Module) -> bool:
    """Return whether PEFT trains a copy of a module and keeps the module."""
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")


def _in_dtype(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Any) -> Any:
    """Convert a module's output, or each tensor of several outputs, to ``dtype``."""
    if isinstance(output, tuple):
        return tuple(_in_dtype(dtype, module, inputs, part) for part in output)
    return output.to(dtype) if isinstance(output, Tensor) and output.is_floating_point() else output


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, a quantiser's replacement, or GPT-2's transposed layer."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@functools.lru_cache(maxsize=256)  # Python parses a whole file to find one class in it
def _read_past(kind: Any) -> frozenset[str]:
    """Return the names of layers whose weights a class multiplies itself, so that an adapter on them has no effect.

    The fused kernels of state spaces (Mamba and its hybrids) take ``self.out_proj.weight``; PEFT refuses an adapter
    there for the model types that it knows.
    """
    functions = [value for base in own_bases(kind) for value in vars(base).values() if inspect.isfunction(value)]
    code = [source_of(function) for function in functions]
    return frozenset(name for text in code for name in WEIGHT_READ.findall(text))


def _puts_out_more(module: nn.Module, holder: nn.Module) -> bool:
    """Return whether a linear layer of the model's own class does more than a product: a router, or groups."""
    if type(module).__module__ != type(holder).__module__ or type(module).forward is nn.Linear.forward:
        return False
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in module.named_parameters()}
    weight = weights["weight"]
    try:
        output = torch.func.functional_call(module, weights, (torch.empty(2, weight.shape[1]).to(weight),))
    except (RuntimeError, ValueError, TypeError):  # the layer takes another input
        return True
    return not isinstance(output, Tensor) or output.shape != (2, weight.shape[0])


def _endings(model: nn.Module, chosen: set[str]) -> list[str]:
    """Return the shortest endings of names by which PEFT finds these modules and no others."""
    others = [name for name, _ in model.named_modules() if name not in chosen]
    for parts in (1, 2):
        short = {".".join(name.split(".")[-parts:]) for name in chosen}
        if not any(name.endswith(tuple(short)) for name in others):
            return sorted(short)
    return sorted(chosen)


def trained_weights(adapted: Any) -> str:
    """Return in words how many weights of a ``peft.PeftModel`` are trained."""
    some, total = adapted.get_nb_trainable_parameters()  # counts weights of 4 bits, too
    return f"{some:,} of {total:,} weights are trained"
