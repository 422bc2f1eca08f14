"""Walk one point: do what it says to texts in progress, and hold every number to the truth of the text alone."""

from __future__ import annotations

import copy
import pickle
import random
import re
import tempfile
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.utils import logging

import ctxext
from ctxext.caches.records import empty
from ctxext.errors import CtxextError
from tests._models import qwen2_vl, tiny
from tests.referee.point import AT_NIGHT, FORMULAS, LIFTED, METHODS, UNWRITTEN, WAYS, Point, drawn
from tests.referee.truth import Decoder, Itself, L, rule_of
from tests.referee.twin import on_a_gpu

WIDTH, SLOTS = 16, 512
SHAPE = {"max_position_embeddings": L, "head_dim": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE["hidden_size"] = 64
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SHAPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(FORMULAS, SHAPE | {"sliding_window": None}),
    "mixtral": SHAPE | {"sliding_window": None},
    "glm": SHAPE,
    "gemma3_text": SHAPE | WINDOWS,
    "gpt_oss": SHAPE | WINDOWS | PLAIN,
    "mistral": SHAPE | {"sliding_window": 16},
    "deepseek_v3": {"max_position_embeddings": L},
    "gpt2": {"n_positions": L},
    "bloom": {},
    **{kind: {"max_position_embeddings": L} for kind in AT_NIGHT},
}
SCALED: dict[str, dict[str, Any]] = {
    "replace": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": L},
    "extend": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": L // 4},
}
"""Scalings of checkpoints by what becomes of them; the second one was trained with its own."""
TOLERANCE = {"float64": 2e-4, "float32": 2e-4, "bfloat16": 0.3, "float16": 0.5 / 8}
"""Largest error as a part of the largest logit; transformers itself rotates in float32. float16 has three bits more
than bfloat16. Some tokens magnify rounding: at one of seed 1796032721, plain float16 is off by 0.048."""
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GREEDY |= {"output_logits": True, "return_dict_in_generate": True}
OTHERS = [("pi", {"factor": 3}), ("self_extend", {"factor": 6, "window": 10}), ("rerope", {"factor": 6, "window": 9})]


class Wrong(Exception):
    """A number that differs from the truth, or a refusal whose sentence is not true."""


@dataclass(eq=False)
class Text:
    """Rows of texts in progress, and the cache that holds them.

    Args:
        history: tokens of each row.
        ids: what lies in each slot.
        keep: slots that hold tokens.
        declared: length that each row may reach, for ``growth="request"``; else None.
        fitted: length that the cached tokens of each row are fitted to.
        stale: True if the cache may not be continued: its extension is another one now.
    """

    cache: Any
    history: list[list[int]]
    ids: Tensor
    keep: Tensor
    declared: list[Any]
    fitted: list[int] = field(default_factory=list)
    stale: bool = False
    broken: bool = False


UNPAGED = ("dynamic_ntk", "dynamic_yarn doubling", *UNWRITTEN)
REFUSALS: list[tuple[str, Callable[[Walk, Text], bool]]] = [
    (r"other positions than its \d+ cached", lambda walk, text: walk.outgrows(text) and not walk.way),
    (r"while (the|a) model was extended by|without a record", lambda walk, text: text.stale),
    (r"attention_mask has a hole", lambda walk, text: walk.point.kind == "bloom" and walk.point.padding != "none"),
    # Also by a copy of the model that is extended no more.
    (
        r"can be cropped by up to \d+ tokens",
        lambda walk, text: {walk.name, METHODS[walk.point.method][0]} & {"streaming", "retrieval_heads"},
    ),
    (r"Some layers of this cache hold", lambda walk, text: text.broken),
    (r"Assisted decoding", lambda walk, text: walk.name.startswith("dynamic") and not walk.by_request),
    (r"Generate from input_ids", lambda walk, text: walk.outgrows(text) and walk.way in ("embeds", "chunks")),
    (r"config of this \w+ was replaced", lambda walk, text: walk.reconfigured),
    (
        r"made for sliding windows",
        lambda walk, text: walk.point.method in LIFTED and walk.point.cache == "of the plain config",
    ),
    (r"PagedAttentionCache|continuous batch|paged cache", lambda walk, text: walk.point.method in UNPAGED),
]
"""What ctxext may refuse, and when its sentence is true."""


@dataclass
class Walk:
    """The walk of one point."""

    point: Point
    chance: random.Random = field(default_factory=random.Random)
    texts: list[Text] = field(default_factory=list)
    owed: list[Any] = field(default_factory=list)
    way: str = ""
    now: list[int] = field(default_factory=list)
    reconfigured: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        point, dtype = self.point, getattr(torch, self.point.dtype)
        self.dtype = point.dtype  # of what is read
        seed = point.seed % 3
        shape = SHAPES.get(point.kind, {})
        if rope := SCALED.get(point.scaled):
            reach = int(rope["factor"] * rope["original_max_position_embeddings"])
            shape = shape | {"rope_parameters": rope, "max_position_embeddings": reach}
        made = qwen2_vl() if point.kind == "qwen2_vl" else tiny(point.kind, seed=seed, **shape)
        self.plain = made.to(dtype)
        for name, parameter in self.plain.named_parameters():
            if name.endswith("bias") or "norm" in name:  # what is 0 or 1 at first hides errors
                torch.manual_seed(len(name))
                parameter.data += 0.2 * torch.randn_like(parameter)
        self.plain.generation_config.eos_token_id = None
        self.plain.config._experts_implementation = "eager"  # the other one has no float64
        self.name, self.how = point.how
        self.model: Any = copy.deepcopy(self.plain)
        if point.adapter == "before":
            self.model = self._adapted(self.model)
        self._patch(self.model)
        if point.adapter in ("after", "merged"):
            self.model = self._adapted(self.model)
        if point.adapter == "merged":
            self.model = self.model.merge_and_unload()
        self._believe()

    def _adapted(self, model: PreTrainedModel) -> Any:
        torch.manual_seed(1)
        how = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 2, "init_lora_weights": False}
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **how)).eval()

    def _patch(self, model: Any) -> None:
        torch.manual_seed(2)
        scaling = {} if self.point.scaled == "none" else {"scaling": self.point.scaled}
        ctxext.patch(model, self.name, trained_length=L, **scaling, **self.how)
        for name, parameter in model.named_parameters():
            if "ctxext_encoding" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)

    def _believe(self) -> None:
        """Choose the truth for the model as it is now."""
        stays = self.point.scaled == "extend" or self.name == "none"
        scaled = SCALED.get(self.point.scaled, {}) if stays else {}
        rule = rule_of(self.name, self.how, WIDTH, scaled) if self.point.kind in FORMULAS else None
        plain = self.plain
        if self.point.adapter != "none":
            plain = self._adapted(copy.deepcopy(plain)).merge_and_unload()
        self.truth: Any = Itself(self.model) if rule is None else Decoder(plain, rule)
        self.known: Any = defaultdict(list)

    # What a text is fitted to.
    def fitted(self, tokens: int, declared: int | None) -> int:
        if not self.name.startswith("dynamic"):
            return 0
        length, growth = (tokens if declared is None else declared), self.how.get("growth", "exact")
        if growth != "doubling" or length <= L:
            return max(length, L)
        return L * 2 ** (-(-length // L) - 1).bit_length()

    def outgrows(self, text: Text) -> bool:
        """Whether the call that was refused gives cached tokens other positions."""
        rows = zip(text.history, text.fitted, text.declared, self.now, strict=False)
        return any(row and now and self.fitted(len(row) + now, said) != before for row, before, said, now in rows)

    def right(self, tokens: list[int], declared: int | None) -> Tensor:
        """Return the true logits of a text."""
        fitted = self.fitted(len(tokens), declared)
        for longer, logits in self.known[fitted]:
            if longer[: len(tokens)] == tokens:
                return logits[: len(tokens)]
        with torch.no_grad():
            self.known[fitted].append((list(tokens), self.truth.logits(torch.tensor(tokens), fitted)))
        return self.known[fitted][-1][1]

    def after(self, prompt: list[int], answer: list[int], declared: int | None) -> Tensor:
        """Return the true logits from which each token of an answer was taken."""
        whole = [*prompt, *answer]
        stops = range(len(whole) - 1, len(prompt) - 1, -1)  # the longest first: the others are its beginnings
        return torch.stack([self.right(whole[:stop], declared)[-1] for stop in stops]).flip(0)

    def settle(self) -> None:
        """Compare what was read with the truth, the longest text first: the others may be its beginnings."""
        for tokens, found, declared, what in sorted(self.owed, key=lambda each: -len(each[0])):
            start = len(tokens) - len(found)
            self.compare(found, self.right(tokens, declared)[start:], f"{what}, tokens from {start}")
        self.owed = []

    def compare(self, found: Tensor, right: Tensor, what: str) -> None:
        """Raise ``Wrong`` unless logits are the true ones."""
        if not len(right):
            return
        scale = float(right.abs().max())
        error = float((found.detach().double() - right).abs().max())
        if not error <= TOLERANCE[self.dtype] * scale:
            raise Wrong(f"{what}: off by {error:.2g} of {scale:.2g}")

    @contextmanager
    def mode(self) -> Iterator[None]:
        """The mode of a call."""
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
        with modes[self.point.mode](), self.backend():
            yield

    def backend(self) -> AbstractContextManager[None]:
        """The kernels of a CPU or of a GPU."""
        return on_a_gpu() if self.point.backend == "gpu" else nullcontext()

    def go(self) -> None:
        """Do all operations.

        Raises:
            Wrong: for a wrong number, and for a refusal that is not true.
        """
        for operation, seed in self.point.operations:
            self.chance.seed(seed)
            torch.manual_seed(seed)
            (name, _, self.way), self.now = operation.partition(" "), []
            try:
                if self.point.takes(name):
                    getattr(self, f"do_{name}")(self.texts[-1] if self.texts else self.begin())
            except CtxextError as error:
                self._judge(name, error, self.texts[-1] if self.texts else None)
            self.settle()

    def _judge(self, name: str, error: CtxextError, text: Text | None) -> None:
        sentence = str(error)
        for pattern, is_true in REFUSALS:
            if re.search(pattern, sentence):
                if text is None or not is_true(self, text):
                    raise Wrong(f"{name}: refused without reason: {sentence[:200]}") from error
                self.texts.remove(text)  # it is over
                return
        raise Wrong(f"{name}: refused by an unlisted sentence: {sentence[:300]}") from error

    # Texts.
    def begin(self) -> Text:
        """Begin a text of empty rows."""
        caches = {"given": DynamicCache, "made": lambda: None}
        caches["of the config"] = lambda: DynamicCache(config=self.model.config)
        caches["of the plain config"] = lambda: DynamicCache(config=self.plain.config)
        caches["static"] = lambda: StaticCache(config=self.model.config, max_cache_len=SLOTS)
        rows = self.point.rows
        declared = [self.chance.choice([20, 60, 120, 150]) if self.by_request else None for _ in range(rows)]
        empty_rows, nothing = [[] for _ in range(rows)], torch.zeros(rows, 0, dtype=torch.long)
        self.texts.append(Text(caches[self.point.cache](), empty_rows, nothing, nothing.bool(), declared))
        return self.texts[-1]

    @property
    def by_request(self) -> bool:
        return self.how.get("growth") == "request"

    def widths(self, text: Text, width: int) -> list[int]:
        """Return how many new tokens each row gets in a call of some width; 0 at most where the row is padded."""
        limits = zip(text.declared, text.history, strict=True)
        room = [min(width, (most or self.point.limit) - len(tokens)) for most, tokens in limits]
        if min(room) <= 0:
            return []
        width = min(room) if self.point.padding == "none" else width
        if self.point.padding == "none" or ("left" in self.point.padding and text.keep.shape[1]):
            return [min(room)] * len(room)
        if self.point.padding == "mostly left":
            whole = self.chance.randrange(len(room))
            return [most if row == whole else min(most, 5) for row, most in enumerate(room)]
        least = [max(0 if tokens else 1, most - 9) for tokens, most in zip(text.history, room, strict=True)]
        counts = [self.chance.randint(*between) for between in zip(least, room, strict=True)]
        return counts if max(counts) else []

    def slots(self, count: int, width: int) -> list[int]:
        """Return the slots of a call that hold a row's tokens."""
        if "left" in self.point.padding:
            return list(range(width - count, width))
        if self.point.padding == "hole":
            return sorted(self.chance.sample(range(width), count))
        return list(range(count))

    def read(self, text: Text, width: int, run: Any = None) -> None:
        """Read a call of new tokens in each row, and compare the logits of all of them."""
        counts = self.widths(text, width)
        if not counts or text.keep.shape[1] + max(counts) > SLOTS:
            return
        width = max(counts) if self.point.padding not in ("right", "hole") else max(width, *counts)
        ids, keep = torch.zeros(len(counts), width, dtype=torch.long), torch.zeros(len(counts), width, dtype=torch.bool)
        for row, count in enumerate(counts):
            at = self.slots(count, width)
            ids[row, at] = torch.tensor([self.chance.randrange(40, 120) for _ in at], dtype=torch.long)
            keep[row, at] = True
        self.now = counts
        found = self.call(text, ids, keep, run)
        self.accept(text, ids, keep)
        for row, tokens in enumerate(text.history):
            self.owed.append((list(tokens), found[row, keep[row]].detach(), text.declared[row], f"row {row}"))

    def accept(self, text: Text, ids: Tensor, keep: Tensor) -> None:
        """Count what was read to a text."""
        text.ids, text.keep = torch.cat([text.ids, ids], 1), torch.cat([text.keep, keep], 1)
        for row, tokens in enumerate(text.history):
            tokens.extend(ids[row, keep[row]].tolist())
        text.fitted = [self.fitted(len(row), said) for row, said in zip(text.history, text.declared, strict=True)]

    def call(self, text: Text, ids: Tensor, keep: Tensor, run: Any = None, **more: Any) -> Tensor:
        """Call the model; the form of its arguments is drawn."""
        whole, form = torch.cat([text.keep, keep], 1), self.point.positions
        counted = (whole.cumsum(1) - 1).clamp(min=0)
        if not whole.all() or form != "left out" or self.chance.random() < 0.5:
            more["attention_mask"] = whole.long()
        forms = {"counted": counted, "ones": counted.masked_fill(~whole, 1), "zeros": counted.masked_fill(~whole, 0)}
        forms["slots"] = torch.arange(whole.shape[1]).expand_as(whole)
        if form in forms:
            more["position_ids"] = forms[form][:, text.keep.shape[1] :]
        if text.declared[0] is not None and (not text.keep.shape[1] or self.chance.random() < 0.5):
            more["ctxext_length"] = text.declared
        elif self.by_request:  # a row that was cropped to nothing begins a text of its own tokens
            begun = zip(text.history, text.declared, keep.sum(1).tolist(), strict=True)
            text.declared = [most if tokens else count or most for tokens, most, count in begun]
        if text.cache is not None:
            more["past_key_values"] = text.cache
        inputs = {"input_ids": ids}
        if self.chance.random() < 0.15:
            inputs = {"inputs_embeds": self.model.get_input_embeddings()(ids)}
        with self.mode():
            output = (self.model if run is None else run)(**inputs, use_cache=True, **more)
        if text.cache is None:
            text.cache = output.past_key_values
        return output.logits

    def do_read(self, text: Text) -> None:
        self.read(text, self.chance.choice([3, 12, 30, 60, 90, 110]))

    def do_fill(self, text: Text) -> None:
        """Read until a text is so long that a cache may drop some."""
        self.read(text, max(1, self.chance.choice([88, 100, 120]) - max(map(len, text.history))))

    def do_step(self, text: Text) -> None:
        self.read(text, self.chance.choice([1, 1, 1, 2, 5, 8]))

    def do_answer(self, text: Text) -> None:
        """Read many calls of few tokens."""
        for _ in range(self.chance.randint(8, 24)):
            self.read(text, self.chance.choice([1, 5, 8, 8]))

    def do_crop(self, text: Text) -> None:
        """Take back the newest slots, and go on with other tokens."""
        slots = text.keep.shape[1]
        if slots < 2:
            return
        removed = min(self.chance.choice([1, 3, 9, 31, 40, 70]), slots - 1)
        text.broken = True  # if the crop is refused, some layers may be cropped
        try:
            text.cache.crop(-removed)
        except RuntimeError as error:  # of transformers: a sliding layer that is full cannot
            if "sliding window size was already reached" not in str(error):
                raise
            self.texts.remove(text)
            return
        text.broken = False
        for row, tokens in enumerate(text.history):
            del tokens[len(tokens) - int(text.keep[row, slots - removed :].sum()) :]
        text.ids, text.keep = text.ids[:, : slots - removed], text.keep[:, : slots - removed]
        self.read(text, self.chance.choice([1, 1, 4, 12, 40]))

    def do_reorder(self, text: Text) -> None:
        rows = [self.chance.randrange(len(text.history)) for _ in text.history]
        rows = rows if rows != [*range(len(rows))] else rows[::-1]
        self._rows(text, rows, lambda cache: cache.reorder_cache(torch.tensor(rows)))

    def do_repeat(self, text: Text) -> None:
        rows = [row for row in range(len(text.history)) for _ in range(2)]
        if len(rows) <= 4:
            self._rows(text, rows, lambda cache: cache.batch_repeat_interleave(2))

    def do_select(self, text: Text) -> None:
        rows = sorted(self.chance.sample(range(len(text.history)), self.chance.randint(1, len(text.history))))
        self._rows(text, rows, lambda cache: cache.batch_select_indices(torch.tensor(rows)))

    def _rows(self, text: Text, rows: list[int], change: Callable[[Any], None]) -> None:
        if not text.keep.shape[1]:
            return
        with self.mode():
            change(text.cache)
        text.history, text.ids, text.keep = [list(text.history[row]) for row in rows], text.ids[rows], text.keep[rows]
        text.fitted, text.declared = ([each[row] for row in rows] for each in (text.fitted, text.declared))
        self.read(text, self.chance.choice([1, 2, 12]))

    def do_fork(self, text: Text) -> None:
        """Go on with a copy, then with the text itself."""
        if text.keep.shape[1]:
            other = copy.deepcopy(text)
            self.texts.insert(0, other)
            self.read(text, 3)
            self.read(text, 12)
            self.texts.append(self.texts.pop(0))
            self.read(other, 3)

    def do_pickle(self, text: Text) -> None:
        if text.keep.shape[1]:
            text.cache = pickle.loads(pickle.dumps(text.cache))
            self.read(text, 2)

    def do_empty(self, text: Text) -> None:
        """Reset a cache, and read another text into it."""
        if not text.keep.shape[1]:
            return
        with self.mode():
            text.cache.reset()
        if self.point.cache != "static" and text.cache.get_seq_length():
            empty(text.cache)
        text.history = [[] for _ in text.history]
        text.ids, text.keep, text.stale = text.ids[:, :0], text.keep[:, :0], False
        if self.chance.random() < 0.5:
            self.do_answer(text)
        else:
            self.read(text, self.chance.choice([1, 5, 30, 60]))

    def do_whole(self, text: Text) -> None:
        """Read one call without a cache, whatever is in progress."""
        fresh = self.begin()
        self.texts.remove(fresh)
        fresh.cache = None
        self.read(fresh, self.chance.choice([5, 40, 100]), lambda **given: self.model(**given | {"use_cache": False}))

    def do_packed(self, text: Text) -> None:
        """Read several documents in one row, whose positions begin again."""
        lengths = [self.chance.choice([1, 7, 40, 50]) for _ in range(3)]
        documents = [[self.chance.randrange(40, 120) for _ in range(length)] for length in lengths]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with self.mode():
            ids = torch.tensor([[token for document in documents for token in document]])
            found = self.model(ids, position_ids=positions, use_cache=False).logits[0]
        for part, document in zip(found.split(lengths), documents, strict=True):
            self.compare(part, self.right(document, None), "packed")

    def do_train(self, text: Text) -> None:
        """Compare gradients, with activations kept or computed again."""
        ids = torch.randint(40, 120, (1, self.chance.choice([20, 50])))
        pads = self.chance.choice([0, 7]) if self.point.padding != "none" else 0
        around = (pads, 0) if "left" in self.point.padding else (0, pads)
        keep = nn.functional.pad(torch.ones_like(ids), around)
        labels = nn.functional.pad(ids, around, value=-100)
        labels[:, : around[0] + 1] = -100
        padded = {"attention_mask": keep, "position_ids": (keep.cumsum(1) - 1).clamp(min=0)}
        names = ["embed_tokens", "layers.0.self_attn.k_proj", "layers.1.self_attn.q_proj"]
        names = [f"model.{name}.weight" for name in names]
        if self.chance.random() < 0.5:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        with torch.enable_grad(), self.backend():
            self.model(nn.functional.pad(ids, around), labels=labels, use_cache=False, **padded).loss.backward()
        self.model.eval()
        self.model.gradient_checkpointing_disable()
        self.model.disable_input_require_grads()  # transformers leaves a hook that no pickle takes
        rights = self.truth.gradients(ids[0], self.fitted(ids.shape[1], None), names)
        for name, right in zip(names, rights, strict=True):
            self.compare(self.model.get_parameter(name).grad, right, f"gradient of {name}")
        self.model.zero_grad()

    def _layer(self) -> nn.Module:
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len)[1]

    def do_thread(self, text: Text) -> None:
        """Read another text in another thread, in the middle of this one."""
        failures: list[str] = []

        def beside() -> None:
            ids = [random.Random(1).randrange(40, 120) for _ in range(45)]
            try:
                with self.mode():
                    found = self.model(torch.tensor([ids]), use_cache=False).logits[0]
                self.compare(found, self.right(ids, None), "beside")
            except Exception:
                failures.append(traceback.format_exc())

        def hook(*_: Any) -> None:
            handle.remove()
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()

        handle = self._layer().register_forward_pre_hook(hook)
        try:
            self.read(text, self.chance.choice([1, 12]))
        finally:
            handle.remove()
        if failures:
            raise Wrong(f"in a thread: {failures[0][-300:]}")

    def do_raise(self, text: Text) -> None:
        """Fail in the middle of a call; texts that begin after it are right."""

        def hook(*_: Any) -> None:
            raise KeyboardInterrupt

        width = min(50, self.point.limit - text.keep.shape[1])
        if width < 1:
            return  # a learned table has no rows beyond
        handle = self._layer().register_forward_pre_hook(hook)
        with self.mode(), suppress(KeyboardInterrupt, CtxextError):
            self.model(torch.randint(40, 120, (len(text.history), width)), past_key_values=text.cache, use_cache=True)
        handle.remove()
        self.texts.remove(text)
        self.read(self.begin(), 40)

    # Models.
    def _again(self, text: Text, name: str, how: dict[str, Any]) -> None:
        """Go on under another extension, or by another model; caches that hold nothing may."""
        self.name, self.how = name, how
        for each in self.texts:
            each.stale = each.stale or bool(each.keep.shape[1])
            each.declared = [(most or 150) if self.by_request else None for most in each.declared]
        self._believe()
        self.read(text, self.chance.choice([1, 12]))

    def do_unpatch(self, text: Text) -> None:
        if self.name != "none":
            ctxext.unpatch(self.model)
            self._again(text, "none", {})

    def do_repatch(self, text: Text) -> None:
        """Unpatch and patch by the same: the cache is right, or refused."""
        if self.name != "none":
            ctxext.unpatch(self.model)
            self._patch(self.model)
            self._again(text, self.name, self.how)

    def do_other(self, text: Text) -> None:
        """Extend by the same method with other parameters, or by another."""
        if self.name != "none":
            ctxext.unpatch(self.model)
        rest = [each for name, each in METHODS.items() if name not in LIFTED and each[1] != self.how]
        alike = [each for each in rest if each[0] == self.name]
        self.name, self.how = self.chance.choice(alike or OTHERS)
        self._patch(self.model)
        self._again(text, self.name, self.how)

    def do_twin(self, text: Text) -> None:
        """Go on with a copy of the model, perhaps unpatched, and perhaps with a copy of the cache."""
        by_file, plain = self.chance.random() < 0.5, self.chance.random() < 0.6
        plain = plain and self.point.kind in FORMULAS and self.name != "none" and not self.reconfigured
        self.model = pickle.loads(pickle.dumps(self.model)) if by_file else copy.deepcopy(self.model)
        if self.chance.random() < 0.5 and text.cache is not None:
            text.cache = copy.deepcopy(text.cache)
        if plain:
            ctxext.unpatch(self.model)
        self._again(text, *(("none", {}) if plain else (self.name, self.how)))

    def do_reload(self, text: Text) -> None:
        """Go on with the saved and loaded model."""
        if self.name == "none":
            return
        with tempfile.TemporaryDirectory() as folder:
            ctxext.save(self.model, f"{folder}/saved")
            self.model = ctxext.load(f"{folder}/saved", dtype=getattr(torch, self.point.dtype)).eval()
        self.model.config._experts_implementation = "eager"
        self._again(text, self.name, self.how)

    def do_config(self, text: Text) -> None:
        """Put an equal config in the place of the model's; from then on neither unpatch nor save may trust it."""
        self.model.config, self.reconfigured = copy.deepcopy(self.model.config), self.name != "none"
        self.read(text, 12)

    def do_cast(self, text: Text) -> None:
        """Cast the model to another dtype and back."""
        there = torch.float32 if self.point.dtype == "float64" else torch.float64
        for model in (self.plain, self.model):
            model.to(there).to(getattr(torch, self.point.dtype))
        self._believe()
        self.read(text, 12)

    def do_resize(self, text: Text) -> None:
        """Add tokens to the vocabulary."""
        for model in (self.plain, self.model):
            torch.manual_seed(3)
            model.resize_token_embeddings(model.get_input_embeddings().num_embeddings + 8)
        self._believe()
        self.read(text, 12)

    def do_weights(self, text: Text) -> None:
        """Load the weights of the original again."""
        self.model.load_state_dict(self.plain.state_dict(), strict=self.point.method not in UNWRITTEN)
        self.read(text, 12)

    def do_autocast(self, text: Text) -> None:
        """Read in bfloat16, whatever the dtype of the weights and of what is cached."""
        self.dtype = "bfloat16"

        def run(**given: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(**given)

        self.read(text, self.chance.choice([1, 12, 40]), run)
        self.read(text, self.chance.choice([1, 12]))

    # Ways to generate.
    def do_generate(self, text: Text) -> None:
        """Generate from a new text or from one in progress, and compare all logits that were used."""
        way, new = self.chance.choice(list(WAYS)), self.chance.choice([2, 6, 12])
        way = self.way or way
        goes_on = way in ("greedy", "chunks") and text.cache is not None and not text.stale and not self.by_request
        goes_on = goes_on and (self.point.cache, self.point.mode) != ("static", "inference")  # torch refuses that
        if not goes_on or (self.point.padding != "none" and self.point.positions in ("left out", "slots")):
            text, goes_on = self.begin(), False
            self.texts.remove(text)
        if way in ("lookup", "assistant"):
            text.history, text.ids, text.keep = text.history[:1], text.ids[:1], text.keep[:1]
        rows, most = len(text.history), max(map(len, text.history))
        width = min(self.chance.choice([4, 26, 40, 90]), self.point.limit - most - new)
        if width < 2 or (way == "assistant" and self.point.kind == "gpt2" and most + width + new > L):
            return  # the plain GPT-2 that assists has no rows beyond
        ids, keep = torch.randint(40, 120, (rows, width)), torch.ones(rows, width, dtype=torch.bool)
        for row in range(rows) if self.point.padding != "none" and not goes_on else ():
            one_side = self.point.padding != "hole"
            holes = list(range(self.chance.randrange(width - 1))) if one_side else []
            keep[row, holes or self.chance.sample(range(width - 1), 0 if one_side else width // 4)] = False
        ids = ids.masked_fill(~keep, 0)
        prompt, mask = torch.cat([text.ids, ids], 1), torch.cat([text.keep, keep], 1)
        histories = [[*tokens, *ids[row, keep[row]].tolist()] for row, tokens in enumerate(text.history)]
        options = GREEDY | {"max_new_tokens": new, "attention_mask": mask.long()} | WAYS[way]
        options |= {"past_key_values": text.cache} if goes_on else {}
        options |= {"assistant_model": self.plain} if way == "assistant" else {}
        self.now, self.way, embed = [new + width] * rows, way, self.model.get_input_embeddings()
        inputs = {"inputs_embeds": embed(prompt)} if way == "embeds" else {"input_ids": prompt}
        if way == "embeds" and self.fitted(1, None) != self.fitted(most + new + width, None):
            text.history, text.fitted = [[0] for _ in text.history], [L] * rows  # refused once it outgrows the window
        if text not in self.texts:
            self.texts.append(text)
        with torch.no_grad(), self.backend():
            out = self.model.generate(**inputs, **options)
        self._generated(out, way, histories, new)
        self.texts.remove(text)
        if goes_on and way == "greedy":
            answer = out.sequences[:, prompt.shape[1] : -1]
            self.accept(text, torch.cat([ids, answer], 1), torch.cat([keep, torch.ones_like(answer).bool()], 1))
            self.texts.append(text)
            self.way, self.now = "", []
            self.read(text, 1)

    def _generated(self, out: Any, way: str, histories: list[list[int]], new: int) -> None:
        each = len(out.sequences) // len(histories)
        for row, sequence in enumerate(out.sequences):
            prompt, answer = histories[row // each], sequence[-new:].tolist()
            rights = self.after(prompt, answer, len(prompt) + new if self.by_request else None)
            if way == "beams":
                score = rights.log_softmax(-1)[range(new), answer].sum()
                self.compare(out.sequences_scores[row][None], score[None], "score of a beam")
            else:
                found = torch.stack([step[row] for step in out.logits])
                self.compare(found, rights, f"generated by {way}, row {row}")

    def do_batches(self, text: Text) -> None:
        """Continuous batches: the probabilities of what they generate."""
        prompts = [[self.chance.randrange(40, 120) for _ in range(length)] for length in (70, 12, 40)]
        settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        sizes = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, page_size=32, return_logprobs=True)
        with self.backend():
            how = {"generation_config": settings, "continuous_batching_config": sizes, "warmup": False}
            results = self.model.generate_batch(prompts, **how)
        for prompt, result in zip(prompts, results.values(), strict=True):
            if result.error is not None:
                raise Wrong(f"a batch: {result.error[:200]}")
            new, declared = result.generated_tokens, len(prompt) + 6 if self.by_request else None
            right = self.after(prompt, new, declared).log_softmax(-1)[range(len(new)), new]
            self.compare(torch.tensor(result.logprobs), right, "a continuous batch")

    def do_compiled(self, text: Text) -> None:
        """Read a step by a compiled model."""
        torch._dynamo.reset()
        try:
            self.read(text, 1, torch.compile(self.model, backend="eager"))
        finally:
            torch._dynamo.reset()


def verdict(point: Point) -> str | None:
    """Return why a point fails; None if all is right, or refused with reason."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        Walk(point).go()
    except Wrong as error:
        return str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:300]} ({place.filename.rpartition('/')[2]}:{place.lineno})"
    finally:
        torch.set_num_threads(threads)
    return None


def walked(seed: int) -> tuple[int, str | None]:
    """Return a seed and why its point fails."""
    return seed, verdict(drawn(seed))


def quiet() -> None:
    """Keep transformers, and what is deprecated, from talking."""
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
