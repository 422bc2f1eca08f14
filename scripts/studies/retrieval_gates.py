"""Heads that retrieve, by scores of attention and by gates trained as DuoAttention trains them: which find better?

    python scripts/studies/retrieval_gates.py --text train.parquet --steps 100 -o gates.json

Gates are those of DuoAttention (Xiao et al., arXiv:2410.10819, section 2.2; mit-han-lab/duo-attention@03dca84): a
number from 0 to 1 for each key-value group, at first 1, mixes the attention of the whole model with attention to the
first and the last tokens; the weights are frozen. Loss: squared difference of the last hidden states to those of the
whole model, on the questions and answers of passkeys of words at the end of a text, plus 0.05 times the mean of the
gates. AdamW, rate warmed up and cooled down over a fifth of the steps each. Smaller here: 2 keys of 8 words in 512
tokens instead of 10 of 32 in up to 32,000; steps as given instead of 2,000.

Each ranking is judged alike: the best share of its groups sees everything, the others the first 4 and the last 256 of
2,048 tokens; keys of five digits are asked for behind a novel, and the novel's own second half is read.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.attention.heads import HeadScores, heads, induction_scores
from ctxext.core.subject import Subject
from ctxext.evaluation.passkey import make_prompts
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.texts.documents import read_documents
from ctxext.texts.haystack import of_text

WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa"
NEEDLE = "\n\nRemember this sequence of words, it is the {} passkey to the vault: "
QUESTION = "\n\nWhat is the {} passkey to the vault? Passkey: "
SINKS, TRAINED_WINDOW, JUDGED_WINDOW, JUDGED = 4, 32, 256, 2048
GATED = "retrieval_gates"


class Gated:
    """Attention of a model whose groups are near, far or between; near groups see the first and the last tokens."""

    def __init__(self, model: Any, kv_heads: Sequence[int]) -> None:
        self.gates = [torch.ones(count) for count in kv_heads]
        self.window = JUDGED_WINDOW
        self.whole: list[Tensor] = []  # outputs of the last pass of the whole model, layer by layer
        self.replays = False  # whether they are mixed with, in the place of this pass's own
        AttentionInterface.register(GATED, self)
        AttentionMaskInterface.register(GATED, sdpa_mask)
        model.config._attn_implementation_internal = GATED

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """Mix the attention of both kinds by the gates of the layer."""
        groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        gate = self.gates[module.layer_idx].repeat_interleave(groups)[None, :, None, None]
        given = {"query": query, "key": key, "value": value, "scale": scaling}
        whole = self.whole[module.layer_idx] if self.replays else None
        if whole is None:
            whole = functional.scaled_dot_product_attention(**given, is_causal=True)
            self.whole = [*self.whole[: module.layer_idx], whole]
        out = whole
        if self.replays or not bool((gate == 1).all()):
            places = torch.arange(tokens)
            back = places[:, None] - places
            near = functional.scaled_dot_product_attention(
                **given, attn_mask=(back >= 0) & ((back < self.window) | (places < SINKS))
            )
            out = (gate * whole + (1 - gate) * near).to(near.dtype)
        return out.transpose(1, 2).contiguous(), None

    def train(self, model: Any, texts: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Train the gates on one text a step: its tokens, and where its questions begin."""
        gates = [torch.ones_like(gate, requires_grad=True) for gate in self.gates]
        optimizer, fifth = torch.optim.AdamW(gates, lr=0.03, weight_decay=0), max(1, len(texts) // 5)
        for step, (tokens, begin) in enumerate(texts):
            optimizer.param_groups[0]["lr"] = 0.03 * min(1, (step + 1) / fifth, (len(texts) - step) / fifth)
            self.gates, self.replays = [torch.ones_like(gate) for gate in gates], False
            with torch.no_grad():
                target = model.model(tokens[None], use_cache=False).last_hidden_state[0, begin:].float()
            self.gates, self.window, self.replays = list(gates), TRAINED_WINDOW, True
            states = model.model(tokens[None], use_cache=False).last_hidden_state[0, begin:].float()
            difference = (states - target).pow(2).mean()
            (difference + 0.05 * torch.cat(gates).abs().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for gate in gates:
                    gate.clamp_(0, 1)
            if step % 10 == 9:
                print(
                    f"step {step + 1}: difference {difference.item():.4f}, gates {torch.cat(gates).mean().item():.3f}"
                )
        self.window, self.replays = JUDGED_WINDOW, False
        return [gate.detach() for gate in gates]

    def losses(self, model: Any, far: set[int] | None, judged: Sequence[tuple[Tensor, int]]) -> list[float]:
        """Return the loss of each text from a token on, with the groups of these numbers far; None for all."""
        numbers = torch.arange(sum(map(len, self.gates))).split([len(gate) for gate in self.gates])
        self.gates = [torch.tensor([float(far is None or int(n) in far) for n in part]) for part in numbers]
        losses = []
        with torch.no_grad():
            for tokens, begin in judged:
                states = model.model(tokens[None], use_cache=False).last_hidden_state[0, begin - 1 : -1]
                losses.append(float(functional.cross_entropy(model.lm_head(states).float(), tokens[begin:])))
        return losses


def with_words(checkpoint: Checkpoint, text: Tensor, tokens: int, seed: int) -> tuple[Tensor, int]:
    """Hide two keys of eight words in a text of so many tokens; return it and where the questions begin."""
    chance = random.Random(seed)

    def encoded(words: str) -> list[int]:
        return list(checkpoint.tokenizer(words, add_special_tokens=False).input_ids)

    keys = {order: " ".join(chance.choices(WORDS.split(), k=8)) for order in ("first", "second")}
    needles = [encoded(NEEDLE.format(order) + key) for order, key in keys.items()]
    questions = [token for order, key in keys.items() for token in encoded(QUESTION.format(order) + key)]
    room = tokens - len(questions) - sum(map(len, needles))
    start = chance.randrange(len(text) - room)
    body = text[start : start + room].tolist()
    first, second = sorted(chance.randrange(1, room) for _ in needles)
    whole = [*body[:first], *needles[0], *body[first:second], *needles[1], *body[second:], *questions]
    return torch.tensor(whole), tokens - len(questions)


def main(
    text: Annotated[Path, typer.Option(help="Novels: the first to train in, the second to judge on.")],
    checkpoint: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M.")] = None,
    steps: int = 100,
    length: int = 512,
    keys: int = 5,
    shares: Annotated[list[float] | None, typer.Option(help="Shares to judge.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON of all numbers.")] = None,
) -> None:
    """Rank by induction, by needles and by gates; judge the best share of each."""
    loaded = load_checkpoint(checkpoint)
    model: Any = loaded.model.requires_grad_(False)
    train, judge = (document for _, document in zip(range(2), read_documents([text]), strict=False))
    encoded = [torch.tensor(loaded.tokenizer(novel.text[20_000:120_000]).input_ids) for novel in (train, judge)]
    seconds, ranked = {}, {}

    def timed(name: str, ranking: Any) -> None:
        begun = time.perf_counter()
        ranked[name] = ranking()
        seconds[name] = time.perf_counter() - begun

    timed("induction, one pass", lambda: induction_scores(Subject.of(model), seeds=[0]).ranked())
    scores: list[HeadScores] = []
    timed("both probes, three passes", lambda: scores.append(heads(model)) or scores[0].ranked())
    gated = Gated(model, scores[0].kv_heads)
    texts = [with_words(loaded, encoded[0], length, seed) for seed in range(steps)]

    def by_gates() -> list[int]:
        values = torch.cat(gated.train(model, texts))
        return [int(number) for number in values.argsort(descending=True, stable=True)]

    timed(f"gates, {steps} steps", by_gates)
    groups = sum(scores[0].kv_heads)
    ranked["random"] = random.Random(0).sample(range(groups), k=groups)
    haystack = of_text(loaded.tokenizer, judge.name, judge.text)
    prompts = make_prompts(loaded.tokenizer, [JUDGED], [0.1], trials=keys, seed=1, haystack=haystack, turning_point=1)
    asked = [(torch.cat([p.passkey.prompt, p.passkey.answer]), len(p.passkey.prompt)) for p in prompts]
    read = [(part, JUDGED // 2) for part in encoded[1][: 2 * JUDGED].split(JUDGED)]
    result: dict[str, Any] = {"seconds": seconds, "ranked": ranked, "judged": {}}
    console = Console()
    for name, far in [("all", None), ("none", set())] + [
        (f"{name}, {share:.0%}", set(list(order)[: max(1, round(share * len(order)))]))
        for share in shares or [0.2, 0.1]
        for name, order in ranked.items()
    ]:
        digits, novel = gated.losses(model, far, asked), gated.losses(model, far, read)
        shared = len(far & set(list(ranked["both probes, three passes"])[: len(far)])) if far else ""
        result["judged"][name] = {"keys": digits, "novel": novel}
        console.print(f"{name:40} keys {sum(digits) / keys:.3f}  novel {sum(novel) / len(novel):.4f}  shared {shared}")
    console.print(seconds)
    if output is not None:
        output.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
