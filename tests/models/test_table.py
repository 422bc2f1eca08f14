"""Tables of learned positions: how they are found, what is refused, what is said, and what lies beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, CLIPTextConfig, GPT2LMHeadModel, PreTrainedModel

import ctxext
from ctxext.checkpoints.adapters import EXTENSION_FILE
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import METHODS
from ctxext.methods.base import TableMethod
from ctxext.models import find_architecture
from ctxext.models.table import LearnedTable
from ctxext.models.table_rows import places_of
from tests._models import RECENT, bert, gpt2, tokens
from tests._tokenizer import make_tokenizer
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

SMALL = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
BERT = SMALL | {"intermediate_size": 48, "max_position_embeddings": 32}


def roberta() -> transformers.RobertaModel:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**(BERT | {"max_position_embeddings": 34, "pad_token_id": 1}))
    return transformers.RobertaModel(config).eval()


def tables(model: PreTrainedModel) -> list[tuple[str, int, int, bool]]:
    found = find_architecture(Subject.of(model))
    assert isinstance(found, LearnedTable)
    return [(table.name, table.rows, table.first, table.skips_padding) for table in found.tables(Subject.of(model))]


# --- found -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "first", "skips_padding"),
    [("gpt2", 0, False), ("bert", 0, False), ("opt", 2, False), ("roberta", 5, True), ("mra", 2, False)],
)
def test_the_first_row_is_watched(model_type: str, first: int, skips_padding: bool) -> None:
    model = tiny_model(tiny_config(model_type, pad_token_id=4))
    [(name, rows, found, skips)] = tables(model)
    assert (found, skips) == (first, skips_padding)
    assert rows == len(dict(model.named_parameters())[name])
    subject = Subject.of(model)
    assert find_architecture(subject).trained_length(subject) == rows - first  # type: ignore[union-attr]


def test_a_model_on_the_meta_device_is_read_as_well() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_positions=64))
    assert tables(model) == [("transformer.wpe.weight", 64, 0, False)]
    assert ctxext.describe(ctxext.patch(model, "pi", factor=2)).target_length == 128
    assert model.transformer.wpe.weight.shape == (128, 768)
    assert model.transformer.wpe.weight.is_meta


@pytest.mark.parametrize("model_type", ["marian", "pegasus", "xglm", "t5", "mamba", "llama", "bloom"])
def test_others_are_not_taken_for_one(model_type: str) -> None:
    model = AutoModel.from_config(tiny_config(model_type))
    assert not isinstance(find_architecture(Subject.of(model)), LearnedTable)


def test_a_random_state_stays_what_it_was() -> None:
    model = gpt2()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    ctxext.patch(model, "pi", factor=2)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("part", ["", "transformer.wpe"])
def test_a_table_that_is_offloaded_is_refused(part: str) -> None:
    """The hook of accelerate would bring back the short one, and the shapes not fit."""
    model, ids = gpt2(), tokens(32)
    pytest.importorskip("accelerate").cpu_offload(model.get_submodule(part), execution_device=torch.device("cpu"))
    before = model(ids).logits
    with pytest.raises(IncompatibleError, match=r"transformer\.wpe\.weight .* it is offloaded\. Load the model"):
        ctxext.patch(model, "tile", factor=2)
    assert torch.equal(model(ids).logits, before)


def test_any_head() -> None:
    model = transformers.BertForSequenceClassification(BertConfig(**BERT)).eval()
    ctxext.patch(model, "tile", factor=4)
    assert torch.isfinite(model(torch.randint(5, 300, (1, 128)))[0]).all()


def test_the_text_side_of_clip_as_long_clip_has_it() -> None:
    model = transformers.CLIPTextModel(CLIPTextConfig(**(BERT | {"max_position_embeddings": 77}))).eval()
    ctxext.patch(model, "stretch", target_length=248)
    assert model.config.max_position_embeddings == 248
    assert torch.isfinite(model(torch.randint(5, 300, (1, 248)))[0]).all()


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="built for the newest transformers")
def test_a_decoder_that_looks_at_its_encoder_first() -> None:
    """It projects what it is told from the encoder's width to its own before it asks for positions."""
    model = tiny_model(tiny_config("cohere_asr", encoder_config={"hidden_size": 64}))
    [(name, rows, first, _)] = tables(model)
    assert (name, rows, first) == ("model.decoder.pos_emb.weight", 64, 0)
    assert ctxext.describe(ctxext.patch(model, "tile", factor=2)).target_length == 128


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tile", "stretch"])
def test_the_text_side_of_a_clip_that_was_extended_whole(method: str, tmp_path: Path) -> None:
    """Its config alone names the length without the part that it is."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = CLIPTextConfig(**(BERT | {"max_position_embeddings": 77, "eos_token_id": 299})).to_dict()
    sizes = {"text_config": text, "vision_config": vision | {"image_size": 28, "patch_size": 14}}
    model = transformers.CLIPModel(transformers.CLIPConfig(**sizes)).eval()
    ctxext.patch(model, method, factor=2).save_pretrained(tmp_path)
    side, ids = ctxext.load(tmp_path, auto_class="CLIPTextModelWithProjection"), torch.randint(5, 299, (1, 154))
    with torch.no_grad():
        stock = transformers.CLIPTextModelWithProjection.from_pretrained(tmp_path).eval()(ids)
        assert torch.equal(side(ids).text_embeds, stock.text_embeds)
    assert ctxext.describe(side).target_length == 154
    if method == "tile":  # whose learned rows are all there
        assert ctxext.unpatch(side).config.max_position_embeddings == 77


def test_a_field_that_says_the_length_again_is_raised_too() -> None:
    model = gpt2()
    model.config.n_ctx = 32
    ctxext.patch(model, "pi", factor=2)
    assert (model.config.n_positions, model.config.n_ctx) == (64, 64)
    ctxext.unpatch(model)
    assert (model.config.n_positions, model.config.n_ctx) == (32, 32)


# --- refused ---------------------------------------------------------------------------------------------------------


def test_a_table_of_fewer_rows_than_are_read() -> None:
    for rows in (4, 5):
        model = BertModel(BertConfig(**BERT | {"max_position_embeddings": rows})).eval()
        with pytest.raises(IncompatibleError, match=f"position_embeddings.weight has {rows} rows, fewer than the 6"):
            ctxext.patch(model, "pi", factor=4)


@pytest.mark.parametrize("method", ["pi", "group", "tile", "hierarchical", "stretch"])
@pytest.mark.parametrize(("trained", "factor"), [(64, 1.0), (64, 1.3), (77, 3.221), (100, 4.0), (33, 7.7)])
def test_rows_that_stay_whole_are_found_without_a_matrix(method: str, trained: int, factor: float) -> None:
    built = METHODS[method](factor=factor)
    assert isinstance(built, TableMethod)
    indices, weights = rows = built.rows(trained, built.target_length(trained))
    matrix = torch.zeros(len(indices), trained, dtype=torch.float64).scatter_add_(1, indices, weights)
    whole = (matrix == 1) & ((matrix != 0).sum(1, keepdim=True) == 1)
    assert torch.equal(places_of(trained, rows), whole.int().argmax(0)[whole.any(0)])


def test_a_quantised_table() -> None:
    model, said = gpt2(), r"wpe\.weight .* cannot be lengthened: it is quantised or sharded \(Par"
    model.transformer.wpe.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, "pi", factor=2)
    assert model.transformer.wpe.weight.dtype is torch.int8
    assert (model.config.n_positions, len(model.transformer.wpe.weight)) == (32, 32)


def test_an_adapter_around_the_table() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["wpe"], r=2))
    with pytest.raises(IncompatibleError, match=r"stands in its place\. Extend the model before you wrap"):
        ctxext.patch(adapted, "pi", factor=2)


def test_an_adapter_elsewhere_is_no_matter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    ctxext.patch(adapted, "tile", factor=2)
    assert torch.isfinite(adapted(torch.randint(0, 300, (1, 64))).logits).all()
    ctxext.save(adapted, tmp_path)
    assert json.loads((tmp_path / EXTENSION_FILE).read_text())["extension"]["target_length"] == 64


def test_a_buffer_that_somebody_changed() -> None:
    model = BertModel(BertConfig(**BERT)).eval()
    model.embeddings.position_ids = model.embeddings.position_ids.flip(1)
    said = r"The buffer embeddings\.position_ids has to grow .* differs from the one that BertModel"
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, "pi", factor=2)
    assert len(model.embeddings.position_embeddings.weight) == 32


def test_the_longer_table_is_trained() -> None:
    model = ctxext.patch(gpt2(), "pi", factor=2).train()
    ids = torch.randint(0, 300, (1, 64))
    model(ids, labels=ids).loss.backward()
    assert model.transformer.wpe.weight.grad.shape == (64, 32)
    frozen = gpt2().requires_grad_(False)
    ctxext.patch(frozen, "pi", factor=2)
    assert not frozen.transformer.wpe.weight.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tile", "hierarchical"])
def test_another_class_of_the_same_type_restores_it(method: str, tmp_path: Path) -> None:
    """Its tables have other names there."""
    model, ids = ctxext.patch(bert(), method, factor=2), tokens(2 * TRAINED_LENGTH)
    model.save_pretrained(tmp_path / "head")
    body = ctxext.load(tmp_path / "head", auto_class="AutoModel")
    assert type(body) is BertModel
    with torch.no_grad():
        expected = model.bert(ids)[0]
        assert torch.equal(body(ids)[0], expected)
        ctxext.save(body, tmp_path / "body")
        head = ctxext.load(tmp_path / "body", auto_class="AutoModelForMaskedLM")
        assert torch.equal(head.bert(ids)[0], expected)
    ctxext.unpatch(head)
    assert head.config.max_position_embeddings == TRAINED_LENGTH


# --- on the disk -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_checkpoint_on_the_disk_is_written_anew(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    assert (tmp_path / "plain/model.safetensors.index.json").is_file()
    with pytest.raises(InvalidParameterError, match=r"link: .* gpt2 changes some of its weights.*a longer table"):
        patch_checkpoint(tmp_path / "plain", tmp_path / "long", "pi", factor=2, link=True)
    written = patch_checkpoint(tmp_path / "plain", tmp_path / "long", "pi", factor=2)
    assert (written.rewritten, written.copied, written.linked) == (True, 0, 0)
    ids = torch.randint(0, 300, (1, 64))
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "long").eval()(ids).logits
    assert torch.equal(found, ctxext.patch(model, "pi", factor=2)(ids).logits)
    assert not (tmp_path / "long/model.safetensors.index.json").exists()


@pytest.mark.slow
def test_inspect_says_what_extends_it(tmp_path: Path) -> None:
    roberta().save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.no_positions == (
        "none: it has learned positions, one vector each for 32 tokens (embeddings.position_embeddings.weight)"
    )
    assert found.trained_length == 32
    extending = {one.method: one.target_length for one in found.verdicts if one.refused is None}
    assert extending.keys() >= {"pi", "tile", "group", "hierarchical", "stretch"}
    assert set(extending.values()) == {128}
    assert all(one.stock for one in found.verdicts if one.refused is None)


@pytest.mark.slow
def test_inspect_of_what_was_extended(tmp_path: Path) -> None:
    ctxext.patch(gpt2(), "tile", factor=2).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.extended == "ctxext tile, trained_length=32"
    assert found.exports is not None
    for target, flag in (("vllm", "--max-model-len"), ("llama.cpp", "-c")):
        made = found.exports[target]
        assert not isinstance(made, str), made
        assert (made.flags, made.exact) == ((flag, "64"), False)
        assert "among the weights" in made.notes[0]


def test_export_of_what_is_not_written_yet(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    for method, given, words in (
        ("pi", {}, "--method pi --factor 2.0 --trained-length 32"),
        ("stretch", {"keep": 4, "trained_length": 24}, "--method stretch --factor 2.0 -p keep=4 --trained-length 24"),
    ):
        with pytest.raises(IncompatibleError, match=rf"^No flag makes vllm read .* ctxext patch SOURCE NEW {words}$"):
            ctxext.export(tmp_path, to="vllm", method=method, factor=2, **given)


def test_describe() -> None:
    model = roberta()
    assert ctxext.describe(model).trained_length == 32, "not the 34 of its config"
    text = str(ctxext.describe(ctxext.patch(model, "pi", factor=4), verbose=True))
    for part in ("32 -> 128 tokens", "max_position_embeddings=130", "plain transformers", "Embedding.weight"):
        assert part in text
    assert "compare with the unextended" in text


def test_a_loaded_checkpoint_that_was_extended_already(tmp_path: Path) -> None:
    ctxext.patch(gpt2(), "pi", factor=1.5).save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert ctxext.describe(model).target_length == 48
    with pytest.raises(PatchStateError, match="already extended"):
        ctxext.patch(model, "pi", factor=2)
    lost = "The 32 learned rows of this gpt2 cannot be recovered from the 48 that method 'pi'"
    with pytest.raises(IncompatibleError, match=lost):
        ctxext.patch(model, "pi", factor=2, trained_length=32)
    with pytest.raises(PatchStateError, match=f"nothing to undo. {lost}.*Load the original checkpoint"):
        ctxext.unpatch(model)
    assert len(model.transformer.wpe.weight) == 48


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_pads_otherwise(tmp_path: Path) -> None:
    model, tokenizer = ctxext.patch(roberta(), "tile", factor=4), make_tokenizer(bos=True)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(7)
    with pytest.raises(InvalidParameterError, match=r"pads with the token 7 .* counts positions of all tokens but 1"):
        ctxext.save(model, tmp_path / "x", tokenizer=tokenizer)
    assert not (tmp_path / "x").exists()
    tokenizer.pad_token, tokenizer.model_max_length = tokenizer.convert_ids_to_tokens(1), 32
    ctxext.save(model, tmp_path / "x", tokenizer=tokenizer)
    assert json.loads((tmp_path / "x/tokenizer_config.json").read_text())["model_max_length"] == 128


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["altclip", "clap"])
def test_padding_of_a_text_part_is_compared_with_that_part(model_type: str, tmp_path: Path) -> None:
    """The whole config of a model of several parts names no padding."""
    tokenizer = make_tokenizer(bos=True)
    model = ctxext.patch(AutoModel.from_config(tiny_config(model_type)), "tile", factor=2)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.text_config.pad_token_id)
    ctxext.save(model, tmp_path / "saved", tokenizer=tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(7)
    with pytest.raises(InvalidParameterError, match=r"pads with the token 7 .* all tokens but 0 "):
        ctxext.save(model, tmp_path / "other", tokenizer=tokenizer)


@pytest.mark.parametrize(("model_type", "method"), [("xlm-roberta", "tile"), ("m2m_100", "pi"), ("fsmt", "pi")])
def test_another_padding_than_the_model_was_built_with(model_type: str, method: str, tmp_path: Path) -> None:
    """The rows of the live model begin behind the padding that it was built with, whatever its config says since."""
    model = tiny_model(tiny_config(model_type))
    built = model.config.pad_token_id
    model.config.pad_token_id = 50
    said = rf"pad_token_id=50, but .* was built with {built}, .* Set it back to {built}\."
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, method, factor=2)
    model.config.pad_token_id = built
    ctxext.patch(model, method, factor=2)
    assert model.config.ctxext["trained_length"] == 64 - (model_type == "xlm-roberta")
    model.config.pad_token_id = 50
    with pytest.raises(IncompatibleError, match=said):
        ctxext.save(model, tmp_path / "saved")
    model.config.pad_token_id = built
    ctxext.save(model, tmp_path / "saved")
    assert ctxext.load(tmp_path / "saved").config.ctxext == model.config.ctxext
