"""Which heads retrieve: scores against attention weights of the model's own eager pass, and a model left untouched."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor

import ctxext
from ctxext.attention.heads import HeadScores, heads, induction_scores, retrieval_share
from ctxext.caches.digest import weights_digest
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.files import digest
from tests._models import RECENT, bert, byte_model, tiny
from tests._tokenizer import make_tokenizer


def repeated(model: Any, seed: int = 0) -> Tensor:
    """The text that a model of 64 tokens reads: its first token where it has one, random tokens, and those again."""
    special = {value for name, value in vars(model.config).items() if name.endswith("_token_id")}
    ordinary = torch.tensor([token for token in range(model.config.vocab_size) if token not in special])
    first = [] if model.config.bos_token_id is None else [model.config.bos_token_id]
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    tokens = ordinary[order[: (64 - len(first)) // 2]].tolist()
    return torch.tensor([*first, *tokens, *tokens])


def by_definition(model: Any, text: Tensor, pairs: list[tuple[int, int]]) -> list[float]:
    """Scores from all attention weights, head by head: of pairs of a query and its twin."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(text[None], output_attentions=True, use_cache=False).attentions
    kv_heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    groups = []
    for layer in layers:
        each = [sum(float(head[i, j] + head[i, j + 1]) for i, j in pairs) / len(pairs) for head in layer[0].float()]
        per_group = len(each) // kv_heads
        groups += [max(each[group * per_group : (group + 1) * per_group]) for group in range(kv_heads)]
    return groups


def induction(model: Any, seed: int = 0) -> list[float]:
    """Scores by induction from all attention weights."""
    text = repeated(model, seed)
    half = len(text) // 2
    first = len(text) % 2
    return by_definition(model, text, [(first + half + i, first + i) for i in range(half - 1)])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_are_the_attention_to_the_twin_and_to_the_token_that_followed_it(kv_heads: int, attention: str) -> None:
    model = tiny(num_attention_heads=4, num_key_value_heads=kv_heads, hidden_size=64, initializer_range=0.3)
    model.set_attn_implementation(attention)
    scores = induction_scores(Subject.of(model), seeds=[0])
    assert scores.kv_heads == (kv_heads,) * model.config.num_hidden_layers
    assert scores.probes["induction"] == pytest.approx(induction(model), abs=1e-6)
    assert scores.spread == {}


def test_scores_are_the_mean_over_seeds_beside_their_spread() -> None:
    model = tiny(initializer_range=0.3)
    scores = heads(model, seeds=(3, 4))
    first, second = torch.tensor(induction(model, 3)), torch.tensor(induction(model, 4))
    assert torch.allclose(torch.tensor(scores.probes["induction"]), (first + second) / 2, atol=1e-6)
    assert torch.allclose(torch.tensor(scores.spread["induction"]), (first - second).abs() / math.sqrt(2), atol=1e-6)
    assert scores == heads(model, seeds=(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_left_as_it_was(dtype: torch.dtype) -> None:
    model = tiny().to(dtype).train()
    model.model.layers[0].eval()
    training = [module.training for module in model.modules()]
    digest, config, state = weights_digest(model), model.config.to_dict(), torch.get_rng_state()
    heads(model)
    assert weights_digest(model) == digest
    assert [module.training for module in model.modules()] == training
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_is_left_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().train()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        heads(model)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())


def texts_read(model: Any, *given: Any, **more: Any) -> list[Tensor]:
    """The texts that a model reads while its heads are scored."""
    texts: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: texts.append(ids[0][0]))
    heads(model, *given, **more)
    hook.remove()
    return texts


def test_special_tokens_are_not_drawn() -> None:
    model = tiny(vocab_size=60, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6)
    text, needles = texts_read(model, seeds=(0,))
    assert torch.equal(
        text, repeated(tiny(vocab_size=60, bos_token_id=3, eos_token_id=4, unk_token_id=5, pad_token_id=6))
    )
    for tokens in (text, needles):
        assert tokens[0] == 3
        assert not {3, 4, 5, 6} & set(tokens[1:].tolist())


def test_a_random_needle_is_said_again_at_the_end() -> None:
    model = tiny(initializer_range=0.3)
    _, text = texts_read(model, seeds=(0,))
    assert len(text) == 64
    *body, last = text.tolist()
    named = text[-8:-4]
    (place,) = (i for i in range(1, 56) if torch.equal(text[i : i + 8], text[-8:]))
    pairs = [(59 + i, place + 3 + i) for i in range(4)]
    assert heads(model, seeds=(0,)).probes["needle"] == pytest.approx(by_definition(model, text, pairs), abs=1e-6)
    assert len({*body, last}) == 64 - 8
    assert len(named) == 4


@pytest.mark.slow
def test_needles_are_hidden_in_the_given_text() -> None:
    tokenizer, model = make_tokenizer(bos=True), byte_model()
    words = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40
    _, text = texts_read(model, tokenizer, text=words, seeds=(7,))
    read = tokenizer.decode(text[1:])
    assert len(text) == 512
    key = re.findall(r"\n\nThe pass key of Lisbon is (\d{5})\.\n\n", read)
    assert len(key) == 2
    assert len(set(key)) == 1
    assert read.endswith(f"The pass key of Lisbon is {key[0]}.\n\n")
    assert re.sub(rf"\n\nThe pass key of Lisbon is {key[0]}\.\n\n", "", read) in words
    scores = heads(model, tokenizer, text=words, seeds=(7,))
    again = [i for i in range(len(text)) if tokenizer.decode(text[i : i + 6]) == f" {key[0]}"]
    pairs = [(again[1] - 1 + i, again[0] - 1 + i) for i in range(6)]
    assert scores.probes["needle"] == pytest.approx(by_definition(model, text, pairs), abs=1e-6)
    assert scores.settings["text"] == digest(words)
    assert scores.settings["tokens"] == {"induction": 511, "needle": 512}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "a text"}, "needs the model's tokenizer"),
        ({"text": "", "tokenizer": make_tokenizer(bos=True)}, "Give a longer text, or none"),
        ({"seeds": ()}, r"seeds must be whole numbers, such as \(0, 1\), found \(\)"),
        ({"seeds": (0, 2**64)}, r"found \(0, 18446744073709551616\)\. torch holds 64 bits"),
        ({"seeds": 3}, "seeds must be whole numbers"),
        ({"seeds": "ab"}, "seeds must be whole numbers"),
    ],
)
def test_what_no_probe_can_be_made_of_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        heads(byte_model(), **given)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: tiny(max_position_embeddings=16), "found on 32 tokens or more"),
        (lambda: tiny(vocab_size=6, bos_token_id=0, eos_token_id=1, pad_token_id=2), "knows 3 ordinary ones"),
        (bert, "lets tokens see later ones"),
        (lambda: tiny("t5"), "is an encoder-decoder"),
        (lambda: tiny("bloom"), "No attention of BloomForCausalLM reaches beyond a window and goes through"),
        (lambda: tiny("falcon"), "No attention of FalconForCausalLM reaches beyond a window and goes through"),
    ],
    ids=["short", "few tokens", "both ways", "encoder-decoder", "bloom", "falcon"],
)
def test_a_model_whose_heads_cannot_be_scored_is_refused(made: Any, said: str) -> None:
    with pytest.raises(IncompatibleError, match=said):
        heads(made())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        {"max_position_embeddings": 33},
        {"vocab_size": 24},
        pytest.param({"vocab_size": 4096, "max_position_embeddings": 4096}, marks=pytest.mark.slow),
    ],
)
def test_small_and_odd_models_are_read(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    texts = texts_read(model, seeds=(0,))
    assert max(map(len, texts)) <= min(2048, model.config.max_position_embeddings)
    assert all(0 <= score <= 1 + 1e-5 for values in heads(model, seeds=(0,)).probes.values() for score in values)


def scores_of(*values: float, kv_heads: tuple[int, ...] = (2, 3)) -> HeadScores:
    return HeadScores(kv_heads=kv_heads, probes={"induction": values}, fingerprint="0123456789ab")


def test_the_best_groups_come_first_and_the_lower_number_of_equal_ones() -> None:
    scores = scores_of(0.1, 0.5, 0.5, 0.0, 0.9)
    assert scores.ranked() == (4, 1, 2, 0, 3)
    assert scores.chosen(share=0.2) == (4,)
    assert scores.chosen(share=0.21) == (1, 4)
    assert scores.chosen(share=0.001) == (4,)
    assert scores.chosen(share=1.0) == (0, 1, 2, 3, 4)
    assert scores.chosen(threshold=0.5) == (1, 2, 4)
    assert scores.chosen(threshold=1.0) == (4,)
    assert [scores.place(group) for group in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_share_is_not_rounded_up_by_an_error_of_rounding() -> None:
    scores = scores_of(*(group / 100 for group in range(90)), kv_heads=(3,) * 30)
    for whole in range(1, 91):
        assert len(scores.chosen(share=whole / 90)) == whole
    assert len(scores.chosen(share=0.2)) == 18


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of the two"),
        ({"share": 0.2, "threshold": 0.1}, "one of the two"),
        ({"share": 0.0}, "share must be above 0 and at most 1, found 0.0"),
        ({"share": 1.5}, "share must be above 0"),
        ({"share": math.nan}, "share must be above 0"),
        ({"threshold": -0.1}, "threshold must be from 0 to 1, found -0.1"),
        ({"threshold": math.nan}, "threshold must be from 0 to 1"),
    ],
)
def test_a_choice_out_of_range_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        scores_of(0.1, 0.2, 0.3, 0.4, 0.5).chosen(**given)


def test_scores_are_read_as_they_were_saved(tmp_path: Path) -> None:
    scores = heads(tiny(), seeds=(1, 2))
    scores.save(tmp_path / "heads.json")
    assert HeadScores.read(tmp_path / "heads.json") == scores


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "{}",
        '{"kv_heads": 3, "probes": {}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {"induction": [0.1]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {"needle": [0.1, NaN]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [3, -1], "probes": {"needle": [0.1, 0.2]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [], "probes": {"needle": []}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": [0.1, 0.2], "spread": {}, "fingerprint": "", "settings": {}}',
    ],
)
def test_a_file_of_something_else_is_refused_with_the_way_out(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "heads.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidParameterError, match=r"ctxext heads CHECKPOINT -o heads\.json"):
        HeadScores.read(path)


@pytest.mark.slow
def test_a_patched_model_is_refused() -> None:
    model = ctxext.patch(tiny(), "yarn", factor=2)
    with pytest.raises(PatchStateError, match=r"ctxext\.unpatch"):
        heads(model)
    assert heads(ctxext.unpatch(model)) == heads(tiny())


@pytest.mark.parametrize("own", ["flash_attention_2", "flex_attention"])
def test_kernels_that_take_no_dense_mask_give_way_while_heads_are_recorded(own: str) -> None:
    model, plain = tiny(initializer_range=0.3), tiny(initializer_range=0.3)
    model.config._attn_implementation_internal = own
    scores = heads(model)
    assert model.config._attn_implementation == own
    assert scores.probes == heads(plain).probes


# Sinks and soft caps take their share of the attention: only the model's own eager function knows of them.
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "gemma3_text", "qwen3", "gpt2", "opt", "mistral"])
def test_scores_are_those_of_the_model_s_own_attention(model_type: str) -> None:
    model = tiny(model_type)
    assert heads(model, seeds=(0,)).probes["induction"] == pytest.approx(induction(model), abs=5e-5)


@pytest.mark.skipif(not RECENT, reason="before transformers 5.23 no tiny model has layers that differ in groups")
def test_layers_may_differ_in_groups() -> None:
    scores = heads(tiny("mimo_v2_flash"), seeds=(0,))
    assert scores.kv_heads == (2, 4, 2)
    assert [len(values) for values in scores.probes.values()] == [8, 8]


def no_table(_: Any) -> Any:
    raise NotImplementedError("not auto-handled")


def several_tables(model: Any) -> Any:
    return torch.nn.ModuleList([model.model.embed_tokens])  # without a weight of its own, as Kyutai's


@pytest.mark.parametrize("table", [no_table, several_tables])
def test_a_model_need_not_have_one_table_of_inputs(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    expected = induction_scores(Subject.of(model), seeds=[0])
    monkeypatch.setattr(type(model), "get_input_embeddings", table)
    assert induction_scores(Subject.of(model), seeds=[0]).scores == expected.scores


def test_attention_that_is_not_finite_is_refused() -> None:
    model = tiny()
    model.get_input_embeddings().weight.data[:] = math.nan
    with pytest.raises(IncompatibleError, match="is not finite"):
        heads(model)


@pytest.mark.nightly
def test_wrappers_and_hooks_change_nothing() -> None:
    scores = heads(tiny(), seeds=(0,))
    in_training = tiny().train()
    in_training.gradient_checkpointing_enable()
    compiled = tiny()
    compiled.model.layers[0].compile()
    for model in (torch.nn.DataParallel(tiny()), torch.compile(tiny()), compiled, in_training, tiny().model):
        assert heads(model, seeds=(0,)).probes == scores.probes


def test_a_default_device_changes_nothing() -> None:
    model, scores = tiny(), heads(tiny(), seeds=(0,))
    with torch.device("meta"):
        assert heads(model, seeds=(0,)).probes == scores.probes


def test_a_layer_that_attends_twice_in_a_pass_has_its_groups_once() -> None:
    """DiffLlama halves its values, and calls attention with each half."""
    model = tiny("diffllama")
    scores = heads(model, seeds=(0,))
    assert scores.kv_heads == (model.config.num_key_value_heads,) * model.config.num_hidden_layers
    extended = ctxext.patch(model, "retrieval_heads", factor=4, share=1.0)
    assert extended.config.ctxext["method"]["heads"] == list(range(sum(scores.kv_heads)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_file_of_scores_fits_the_model_in_every_dtype_and_without_its_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The command scores in bfloat16, programs load in float32, and ``ctxext patch`` reads no weights."""
    path = tmp_path / "heads.json"
    scores = heads(tiny().bfloat16(), seeds=(0,))
    scores.save(path)
    for model in (tiny().to(dtype), tiny().to("meta")):
        extended = ctxext.patch(model, "retrieval_heads", factor=4, heads=path)
        assert extended.config.ctxext["method"]["heads"] == list(scores.chosen(share=0.2))


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    heads(tiny(), seeds=(0,)).save(path)
    deeper = tiny(num_hidden_layers=3)
    for model in (tiny(seed=1), deeper, deeper.to("meta")):
        with pytest.raises(InvalidParameterError, match="holds the scores of another model, or of one that was fine"):
            ctxext.patch(model, "retrieval_heads", factor=4, heads=str(path))


@pytest.mark.parametrize("when", ["written", "given"])
def test_a_file_of_scores_fits_no_weights_that_processes_share(tmp_path: Path, when: str) -> None:
    """DeepSpeed ZeRO-3 puts an id on each weight, and leaves no numbers in it."""
    model, path, scores = tiny(), tmp_path / "heads.json", heads(tiny(), seeds=(0,))
    replace(scores, fingerprint="unknown" if when == "written" else scores.fingerprint).save(path)
    if when == "given":
        next(model.parameters()).ds_id = 0
    with pytest.raises(IncompatibleError, match=r"processes share its weights, or shared them.*heads=\[2, 5\]"):
        ctxext.patch(model, "retrieval_heads", factor=4, heads=path)


def test_the_heads_of_a_model_whose_weights_are_offloaded_are_scored_where_they_are_brought_back() -> None:
    model, wanted = tiny(initializer_range=0.3), heads(tiny(initializer_range=0.3))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert heads(model).probes == wanted.probes
    extended = ctxext.patch(model, "retrieval_heads", factor=4)
    plain = ctxext.patch(tiny(initializer_range=0.3), "retrieval_heads", factor=4)
    assert extended.config.ctxext["method"] == plain.config.ctxext["method"]


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        (lambda: tiny("mistral", sliding_window=16), {}, r"sees only the last 16 tokens.*'lift'.*'keep'"),
        (tiny, {"sliding_window": "drop"}, "must be 'keep' or 'lift'"),
        (tiny, {"sliding_window": "lift"}, "already see the whole text"),
        (tiny, {"attention": "falsh"}, "'flash'"),
        (lambda: tiny("ministral3"), {"temperature": "yarn", "scaling": "extend"}, "would sharpen twice"),
        (lambda: tiny("gpt2"), {}, "is not for the positions of this gpt2. Methods for it: .*tile"),
        (lambda: tiny("xglm"), {}, "is not for the positions of this xglm. Methods for it: .*pi"),
    ],
    ids=["windows", "no choice", "lifted", "backend", "temperature", "table", "sinusoids"],
)
def test_heads_are_scored_after_all_that_is_refused_without_them(made: Any, given: dict[str, Any], said: str) -> None:
    model, read = made(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: read.append(ids))
    with pytest.raises(CtxextError, match=said):
        ctxext.patch(model, "retrieval_heads", factor=4, **given)
    assert not read


def test_heads_are_scored_across_windows_that_are_lifted() -> None:
    """Windows as long as the probe hide nothing of it; shorter ones leave nothing to score."""
    wanted = ctxext.patch(tiny("mistral", sliding_window=None), "retrieval_heads", factor=4)
    lifted = ctxext.patch(tiny("mistral", sliding_window=64), "retrieval_heads", factor=4, sliding_window="lift")
    assert lifted.config.ctxext["method"] == wanted.config.ctxext["method"]
    with pytest.raises(IncompatibleError, match="reaches beyond a window"):
        ctxext.patch(tiny("mistral", sliding_window=16), "retrieval_heads", factor=4, sliding_window="lift")
    with pytest.raises(IncompatibleError, match="reaches beyond a window"):
        heads(tiny("mistral", sliding_window=64))


@pytest.mark.parametrize("chosen", [(0, 3), (1,), (2, 3), (0, 1, 2, 3)])
def test_an_extended_model_tells_the_share_of_the_heads_that_it_chose(chosen: tuple[int, ...]) -> None:
    model = tiny(num_key_value_heads=2)
    wanted = induction(model)
    ctxext.patch(model.train(), "retrieval_heads", factor=4, heads=chosen)
    attends = [vars(module).get("_ctxext_attend") for module in model.modules()]
    assert retrieval_share(model) == pytest.approx(sum(wanted[group] for group in chosen) / len(chosen), abs=1e-6)
    assert [vars(module).get("_ctxext_attend") for module in model.modules()] == attends
    assert all(module.training for module in model.modules())


def test_a_share_of_heads_that_do_not_read_far_is_refused() -> None:
    with pytest.raises(PatchStateError, match="not extended by retrieval_heads"):
        retrieval_share(ctxext.patch(tiny(), "self_extend", factor=4))
    changed = ctxext.patch(tiny(), "retrieval_heads", factor=4, heads=[0], exact=False, window=16)
    with pytest.raises(IncompatibleError, match=r"changes texts of more than 16 tokens.*Set exact to true"):
        retrieval_share(changed)
