"""Sliding window, YaRN's and LongLoRA's loss, each against its definition written out with the plain model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.forward import cached_tokens_for, pass_bytes
from ctxext.measuring.loss import Window, loss_by_position, truncation_windows
from ctxext.quantities import parse_bytes
from scripts.studies import published_perplexity
from scripts.studies.published_perplexity import longlora_starts, mean_of_windows, yarn_windows
from tests._models import tiny, trained_for
from tests._programs import script

CLOSE: dict[str, Any] = {"rel": 1e-5}


@pytest.fixture
def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 256, (1, n), generator=generator) for n in (90, 71, 40)]


def scored_by_hugging_face(model: LlamaForCausalLM, tokens: list[int], ignored: int) -> float:
    """The loss that the published scripts take: transformers' own, with the first labels masked."""
    ids = torch.tensor([tokens])
    labels = ids.clone()
    labels[:, :ignored] = -100
    with torch.no_grad():
        return float(model(ids, labels=labels).loss)


def behind_bos(ids: Tensor) -> Tensor:
    return torch.cat([torch.tensor([[256]]), ids], dim=1)


def read(model: LlamaForCausalLM, texts: list[Tensor], windows: list[tuple[Window, ...]]) -> list[Tensor]:
    """The losses of each text's windows, one after the other."""
    pairs = zip(texts, windows, strict=True)
    return [torch.cat([window.losses(model, ids)[0] for window in own]) for ids, own in pairs]


def sizes(windows: list[tuple[Window, ...]]) -> list[list[int]]:
    return [[window.scored for window in own] for own in windows]


@pytest.mark.parametrize(("length", "stride", "bos"), [(32, 8, 256), (32, 8, None), (25, 24, 256), (200, 16, 256)])
def test_yarn_is_its_published_loop(
    model: LlamaForCausalLM, texts: list[Tensor], length: int, stride: int, bos: int | None
) -> None:
    room = length if bos is None else length - 1
    means = []
    for ids in texts:
        tokens, done, begin = ids[0].tolist(), 0, 0
        while True:
            end = min(begin + room, len(tokens))
            window = ([] if bos is None else [bos]) + tokens[begin:end]
            means.append(scored_by_hugging_face(model, window, max(0, len(window) - (end - done))))
            done = end
            if end == len(tokens):
                break
            begin += stride
    fronted = texts if bos is None else [behind_bos(ids) for ids in texts]
    prefix = 0 if bos is None else 1
    windows = [yarn_windows(ids.shape[1], length=length, stride=stride, prefix=prefix) for ids in fronted]
    found = read(model, fronted, windows)
    average = mean_of_windows(found, sizes(windows))
    assert average == pytest.approx(sum(means) / len(means), **CLOSE)
    assert (sum(map(len, windows)), sum(map(len, found))) == (len(means), 201 if bos else 198)
    # Not the mean over tokens: that is what this form is kept for.
    assert abs(average - torch.cat(found).mean().item()) > 1e-4 or length == 200
    assert mean_of_windows([part + 1 for part in found], sizes(windows)) == pytest.approx(average + 1)


def test_yarn_truncated_is_the_published_figure(model: LlamaForCausalLM, texts: list[Tensor]) -> None:
    means = [scored_by_hugging_face(model, [256, *ids[0, :29].tolist()], 1) for ids in texts]
    windows = [yarn_windows(ids.shape[1] + 1, length=30, prefix=1, truncate=True) for ids in texts]
    found = read(model, [behind_bos(ids) for ids in texts], windows)
    assert mean_of_windows(found, sizes(windows)) == pytest.approx(sum(means) / 3, **CLOSE)
    assert [len(part) for part in found] == [29, 29, 29]
    with pytest.raises(InvalidParameterError, match="from 1 to 29"):
        yarn_windows(91, length=30, stride=30, prefix=1)


def test_longlora_is_its_published_loop(model: LlamaForCausalLM, texts: list[Tensor]) -> None:
    data = np.concatenate([ids[0].numpy() for ids in texts]).astype(np.uint16)
    length, stride = 32, 24
    starts = list(range(0, len(data) - length, stride))
    starts.pop()
    means = [scored_by_hugging_face(model, data[i : i + length].astype(int).tolist(), 0) for i in starts]
    stream = torch.cat(texts, dim=1)
    ours = longlora_starts(201, length=length, stride=stride)
    windows = [Window(start, start + length, length - 1) for start in ours]
    found = [window.losses(model, stream)[0] for window in windows]
    assert mean_of_windows(found, [[31]] * len(starts)) == pytest.approx(sum(means) / len(means), **CLOSE)
    # The seams at 90 and 161 are read across, and tokens are scored again and again.
    assert any(i < 90 < i + length for i in starts)
    assert sum(map(len, found)) == len(starts) * (length - 1) > 201
    with pytest.raises(InvalidParameterError, match=r"more than 225 tokens in all.*found 201"):
        longlora_starts(201, length=201, stride=stride)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sliding", "yarn", "longlora"])
def test_the_command_averages_as_the_protocol_does(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, mode: str
) -> None:
    trained_for(model, 64).save_pretrained(tmp_path / "checkpoint")
    bos_tokenizer.save_pretrained(tmp_path / "checkpoint")
    book, window, stride = "".join(f"word {n}, " for n in range(40)), 96, 24
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    command = f"{tmp_path}/checkpoint -t {tmp_path}/book.txt -m pi -f 2 -w 96 --stride 24 --tokens 300 --mode {mode}"
    table = script(published_perplexity.main, *command.split(), "--dtype", "fp32", "-o", tmp_path / "out", code=0)
    ids = torch.tensor([bos_tokenizer(book).input_ids[:301]])
    if mode == "longlora":  # without BOS
        texts = [ids[:, 1 + at : 1 + at + window] for at in longlora_starts(300, length=window, stride=stride)]
        windows = [(Window(0, window, window - 1),)] * len(texts)
    else:
        texts = [ids[:, :300]]
        layout = yarn_windows(300, length=window, stride=stride, prefix=1)
        sliding = truncation_windows(299, window=window, stride=stride, prefix=1)
        windows = [layout if mode == "yarn" else sliding]
    with ctxext.patched(model, "pi", factor=2.0):
        losses = read(model, texts, windows)
    mean = torch.cat(losses).mean() if mode == "sliding" else mean_of_windows(losses, sizes(windows))
    assert f"| PI | {math.exp(mean):,.0f} |" in table.stdout
    assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8") in table.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--mode longlora --bos bos", "LongLoRA's protocol has nothing before a text"),
        ("--tokens 32", "--tokens must be at least 33"),
        ("--truncate", "truncate has no meaning in mode 'sliding'"),
        ("--mode slidin", "'slidin' is not one of"),
    ],
)
def test_what_a_protocol_does_not_have_is_refused(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, options: str, says: str
) -> None:
    model.save_pretrained(tmp_path / "checkpoint")
    bos_tokenizer.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "book.txt").write_text("word " * 20, encoding="utf-8")
    command = f"{tmp_path}/checkpoint -t {tmp_path}/book.txt -w 32 -o {tmp_path}/out {options}"
    assert says in script(published_perplexity.main, *command.split()).output


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk", "alibi"])
def test_cached_pieces_give_the_losses_of_one_pass(
    model: LlamaForCausalLM, input_ids: Tensor, method: str | None
) -> None:
    trained_for(model, 32)
    if method is not None:
        ctxext.patch(model, method, factor=4.0)
    whole = loss_by_position(model, input_ids)
    calls = []
    hook = model.model.register_forward_hook(lambda *_: calls.append(1))
    for piece in (7, 32, 88):
        found = loss_by_position(model, input_ids, cached=piece, chunk=20)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert len(calls) == 13 + 3 + 2
    hook.remove()
    with pytest.raises(InvalidParameterError, match="cached must be"):
        loss_by_position(model, input_ids, cached=0)


def test_cached_pieces_refuse_stock_positions_that_follow_the_length(input_ids: Tensor) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.update({"rope_parameters": rope, "vocab_size": 257, "max_position_embeddings": 32})
    stock = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(IncompatibleError, match="follow the length"):
        loss_by_position(stock, input_ids, cached=20)


def test_memory_budget(model: LlamaForCausalLM) -> None:
    assert [parse_bytes(text) for text in ("2GiB", "1.5 GB", "800MiB", "7k")] == [2**31, 15 * 10**8, 800 * 2**20, 7000]
    for text in ("", "GiB", "2 GiBs", "-1GB", "0GB"):
        with pytest.raises(InvalidParameterError, match="written like 2GiB"):
            parse_bytes(text)
    subject = Subject.of(model)
    assert cached_tokens_for(subject, 4096, None) is None
    model.set_attn_implementation("eager")  # scores of all queries and keys: where a cache is worth its while
    whole, pieces = (pass_bytes(subject, 4096, cached=cached) for cached in (None, 256))
    assert whole > 4 * pieces
    head = 128 * 2**20
    assert cached_tokens_for(subject, 4096, whole + head) is None
    assert cached_tokens_for(subject, 4096, whole + head - 1) == 2048
    assert cached_tokens_for(subject, 4096, pieces + head) == 256
    with pytest.raises(InvalidParameterError, match=r"in one pass and .* in cached pieces of 256"):
        cached_tokens_for(subject, 4096, pieces + head - 1)


@pytest.mark.parametrize(
    ("kind", "field", "most"),
    [("gemma3n_text", "intermediate_size", 192), ("hunyuan_v1_moe", "num_experts_per_tok", 2)],
)
def test_a_pass_is_estimated_by_the_widest_of_the_layers_that_a_config_lists(kind: str, field: str, most: int) -> None:
    subject = Subject.of(tiny(kind))
    setattr(subject.config, field, most)
    expected = pass_bytes(subject, 4096)
    setattr(subject.config, field, [most // 2, *[most] * (subject.config.num_hidden_layers - 1)])
    assert pass_bytes(subject, 4096) == expected
    assert cached_tokens_for(subject, 4096, expected + 2**28) is None
