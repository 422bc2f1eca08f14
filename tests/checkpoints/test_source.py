"""A checkpoint is loaded, measured and trained as the same model, bit for bit: the one of transformers and PEFT."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin
from typer.testing import CliRunner

import ctxext
from ctxext.caches.digest import weights_digest
from ctxext.checkpoints.source import gguf_inside, read_tokenizer
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.cli.app import app
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.training import checkpoint as training
from ctxext.training.settings import Settings, read_settings
from tests._checkpoints import save_with_tokenizer as saved
from tests._gguf import write_gguf
from tests._models import logits, tiny, tokens
from tests._products import crossed
from tests._tokenizer import make_tokenizer
from tests.training._recipe import CONFIG, SMALL, words_of
from tests.walk.tiny import TRAINED_LENGTH

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Each type with a method that it takes and the dtype that its weights are stored in.
TYPES = {"llama": ("yarn", "fp32"), "qwen3": ("dynamic_ntk", "bf16"), "gemma3_text": ("ntk", "fp32")}
TYPES |= {"gpt_neox": ("self_extend", "fp16"), "gpt2": ("pi", "bf16"), "bloom": ("pi", "fp32")}
# What "auto" makes of a stored dtype on a CPU, and why.
AUTO = {
    "fp32": ("bf16", "stored in float32"),
    "bf16": ("bf16", "stored in bfloat16"),
    "fp16": ("fp32", "stored in float16, which bfloat16 would round and a CPU does not compute in"),
}


def plain(place: Path, dtype: str) -> Any:
    """Load a checkpoint with transformers alone."""
    return AutoModelForCausalLM.from_pretrained(place, dtype=DTYPES[dtype]).eval()


def run(source: Path, *words: str) -> Settings:
    """Make the settings of a training run that begins from a checkpoint."""
    own = {"checkpoint": source, "data.train": "texts.txt", "output": source.parent / "run"}
    return read_settings(CONFIG, words_of(SMALL | own, *words))


def trained(source: Path, *words: str) -> Checkpoint:
    return training.load_base(run(source, *words), CPU)


def require_same(found: Any, expected: Any, length: int = 80) -> None:
    """Fail unless two models have one class, config, state and logits, and both are in evaluation mode."""
    assert type(found) is type(expected)
    assert not found.training
    state, wanted = found.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name
    models = [Subject.of(model).model for model in (found, expected)]
    for one, other in zip(*(model.modules() for model in models), strict=True):
        buffers = dict(other.named_buffers(recurse=False))  # rotary frequencies are in no state dict
        for name, buffer in one.named_buffers(recurse=False):
            assert torch.equal(buffer, buffers[name]), name
    configs = [model.config.to_dict() for model in models]
    for config in configs:
        config.pop("_name_or_path", None)
    assert configs[0] == configs[1]
    text = tokens(length)
    assert torch.equal(logits(found, text), logits(expected, text))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_type_in_the_dtype_that_is_chosen_for_it(model_type: str, tmp_path: Path) -> None:
    method, stored = TYPES[model_type]
    place = saved(tiny(model_type).to(DTYPES[stored]), tmp_path / "model")
    chosen, why = AUTO[stored]
    measured = load_checkpoint(str(place), device="cpu")
    require_same(measured.model, plain(place, chosen), length=48)
    assert (measured.name, measured.dtype_note) == ("model", f"{chosen} ({why})")
    assert measured.sha256 == weights_digest(plain(place, chosen))
    base = trained(place)
    require_same(base.model, plain(place, "fp32"), length=48)
    assert base.sha256 == weights_digest(plain(place, "fp32"))

    extended = ctxext.patch(plain(place, chosen), method, factor=2.0)
    require_same(ctxext.load(place, method, factor=2.0, dtype=DTYPES[chosen]), extended)
    longer = saved(extended, tmp_path / "longer")
    require_same(ctxext.load(longer, dtype=DTYPES[chosen]), extended)
    measured = load_checkpoint(str(longer), device="cpu")
    require_same(measured.model, ctxext.load(longer, dtype=measured.model.dtype))
    assert measured.dtype_note.startswith(AUTO[chosen][0])
    undone = ctxext.unpatch(load_checkpoint(str(longer), device="cpu", dtype=chosen).model)
    require_same(undone, plain(place, chosen), length=48)
    trained_length = str(ctxext.describe(extended).trained_length)
    onward = trained(longer, "--extension.trained_length", trained_length, "--dtype", "bf16")
    rounded = saved(plain(place, chosen), tmp_path / "rounded")  # twice, where the extension was saved in that dtype
    require_same(onward.model, plain(rounded, "bf16"), length=48)


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "dtype"), crossed(list(DTYPES), list(DTYPES)))
def test_any_dtype_that_is_asked_for(stored: str, dtype: str, tmp_path: Path) -> None:
    place = saved(tiny().to(DTYPES[stored]), tmp_path)
    measured = load_checkpoint(str(place), device="cpu", dtype=dtype)
    require_same(measured.model, plain(place, dtype))
    assert measured.dtype_note == f"{dtype} (as asked for)"
    if dtype != "fp16":
        require_same(trained(place, "--dtype", dtype).model, plain(place, dtype))


@pytest.mark.nightly
def test_an_encoding_with_weights_of_its_own(tmp_path: Path) -> None:
    extended = ctxext.patch(tiny(), "kerple", factor=2.0)
    longer = saved(extended, tmp_path)
    require_same(load_checkpoint(str(longer), device="cpu", dtype="fp32").model, extended)
    require_same(ctxext.load(longer), extended)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_masked_language_model(dtype: str, tmp_path: Path) -> None:
    place = saved(tiny("bert"), tmp_path / "model")
    expected = transformers.AutoModelForMaskedLM.from_pretrained(place, dtype=DTYPES[dtype]).eval()
    require_same(load_checkpoint(str(place), device="cpu", dtype=dtype, masked=True).model, expected, length=48)
    ctxext.patch(expected, "pi", factor=2.0)
    longer = saved(expected, tmp_path / "longer")
    require_same(load_checkpoint(str(longer), device="cpu", dtype=dtype, masked=True).model, expected, length=48)
    require_same(ctxext.load(longer, dtype=DTYPES[dtype]), expected, length=48)
    encoder = transformers.BertModel(expected.config.from_pretrained(place))
    headless = saved(ctxext.patch(encoder, "pi", factor=2), tmp_path / "less")
    with pytest.raises(CheckpointError, match="BertForMaskedLM"):
        load_checkpoint(str(headless), device="cpu", masked=True)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny(), tmp_path_factory.mktemp("gguf") / "tiny.q8.gguf", quantised=("blk.0.ffn_up.weight",))


def from_gguf(file: Path, dtype: str) -> Any:
    place: dict[str, Any] = {"gguf_file": file.name}
    if hasattr(transformers, "GgufConfig"):  # since 5.17, before which transformers unpacked every file
        place["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(file.parent, dtype=DTYPES[dtype], **place).eval()


@pytest.mark.nightly
def test_a_gguf_file(gguf_file: Path, tmp_path: Path) -> None:
    measured = load_checkpoint(str(gguf_file), device="cpu")
    require_same(measured.model, from_gguf(gguf_file, "bf16"))
    assert (measured.name, measured.dtype_note) == ("tiny", "bf16 (weights dequantised from GGUF)")
    assert measured.tokenizer.convert_ids_to_tokens(4) == "ab"
    require_same(trained(gguf_file).model, from_gguf(gguf_file, "fp32"))
    extended = ctxext.patch(from_gguf(gguf_file, "fp32"), "yarn", factor=2.0)
    require_same(ctxext.load(gguf_file, "yarn", factor=2.0, dtype=torch.float32), extended)
    with pytest.raises(CheckpointError, match=r"masked language model: GGUF files hold causal ones\."):
        load_checkpoint(str(gguf_file), masked=True)


def adapted(model: Any, base: Path) -> Any:
    """Wrap a model with an adapter whose weights are not zero."""
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    return wrapped.eval()


@pytest.mark.nightly
def test_a_plain_adapter(tmp_path: Path) -> None:
    base, place = saved(tiny(), tmp_path / "base"), tmp_path / "adapter"
    adapted(plain(base, "fp32"), base).save_pretrained(place)
    for dtype in ("fp32", "bf16"):
        measured = load_checkpoint(str(place), device="cpu", dtype=dtype)
        require_same(measured.model, PeftModel.from_pretrained(plain(base, dtype), place).eval())
        assert measured.name == "adapter"
    assert load_checkpoint(str(place), device="cpu").dtype_note == "bf16 (stored in float32)"
    with pytest.raises(CheckpointError, match="it was saved without an extension"):
        ctxext.load(place)
    for given in (None, base, plain(base, "fp32")):
        extended = ctxext.load(place, "self_extend", factor=2, base=given)
        expected = ctxext.patch(PeftModel.from_pretrained(plain(base, "fp32"), place), "self_extend", factor=2)
        require_same(extended.eval(), expected.eval())
    extended.save_pretrained(tmp_path / "extended")
    require_same(ctxext.load(tmp_path / "extended").eval(), expected.eval())
    with pytest.raises(CheckpointError, match="carries its own extension"):
        ctxext.load(tmp_path / "extended", "yarn", factor=2)
    with pytest.raises(CheckpointError, match="is an adapter"):
        load_checkpoint(str(place), device="cpu", masked=True)
    with pytest.raises(CheckpointError, match="is an adapter on"):
        trained(place)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["yarn", "kerple"])
def test_an_adapter_with_its_extension(method: str, tmp_path: Path) -> None:
    base, place = saved(tiny(), tmp_path / "base"), tmp_path / "adapter"
    expected = adapted(ctxext.patch(plain(base, "fp32"), method, factor=2.0), base)
    ctxext.save(expected, place)
    measured = load_checkpoint(str(place), device="cpu", dtype="fp32")
    require_same(measured.model, expected)
    require_same(ctxext.load(place).eval(), expected)
    assert measured.tokenizer.bos_token_id == 256, "its base's tokenizer"
    own = transformers.PreTrainedTokenizerFast.from_pretrained(base)
    own.add_tokens(["<own>"])
    own.save_pretrained(place)
    assert len(load_checkpoint(str(place), device="cpu").tokenizer) == 258, "its own where it has one"


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "yarn"])
def test_an_adapter_on_a_gguf_file(method: str | None, gguf_file: Path, tmp_path: Path) -> None:
    model = from_gguf(gguf_file, "fp32")
    expected = adapted(model if method is None else ctxext.patch(model, method, factor=2.0), gguf_file)
    expected.save_pretrained(tmp_path)
    measured = load_checkpoint(str(tmp_path), device="cpu", dtype="fp32")
    require_same(measured.model, expected)
    assert measured.tokenizer.convert_ids_to_tokens(4) == "ab"
    assert load_checkpoint(str(tmp_path), device="cpu").dtype_note.startswith("bf16 (")
    if method is not None:
        require_same(ctxext.load(tmp_path, dtype=torch.float32).eval(), expected)


class Rounding(QuantizationConfigMixin):  # type: ignore[misc]
    """A quantisation that any machine can do: weights become multiples of 1/16."""

    def __init__(self, steps: int = 16, quant_method: str = "rounding", **_: Any) -> None:
        self.quant_method, self.steps = quant_method, steps


class Rounder(HfQuantizer):  # type: ignore[misc]
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None: ...

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for weight in model.parameters():
            weight.data = (weight.data * self.quantization_config.steps).round() / self.quantization_config.steps

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let transformers know it, and let a run ask for it in the place of bitsandbytes', which this machine lacks."""
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "rounding", Rounding)
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "rounding", Rounder)
    asked: list[dict[str, Any]] = []

    def in_its_place(**settings: Any) -> Rounding:
        asked.append(settings)
        return Rounding()

    monkeypatch.setattr(training, "BitsAndBytesConfig", in_its_place)
    return asked


@pytest.mark.nightly
def test_a_quantised_model(rounding: list[dict[str, Any]], tmp_path: Path) -> None:
    place = saved(tiny(), tmp_path / "model")

    def expected(dtype: str) -> Any:
        how = {"dtype": DTYPES[dtype], "quantization_config": Rounding(), "device_map": {"": "cpu"}}
        return AutoModelForCausalLM.from_pretrained(place, **how).eval()

    found = trained(place, "--quantisation", "nf4", "--dtype", "bf16")
    model: Any = found.model
    require_same(model, expected("bf16"))
    assert not torch.equal(model.lm_head.weight, plain(place, "bf16").lm_head.weight)
    assert (found.name, found.dtype_note) == ("model", "nf4, computed in bf16")
    assert rounding[0]["bnb_4bit_quant_type"] == "nf4"
    extended = ctxext.patch(expected("fp32"), "yarn", factor=2.0)
    require_same(ctxext.load(place, "yarn", factor=2.0, quantization_config=Rounding(), dtype=torch.float32), extended)
    longer = saved(ctxext.patch(plain(place, "fp32"), "yarn", factor=2.0), tmp_path / "longer")
    onward = trained(longer, "--extension.trained_length", "64", "--quantisation", "nf4")
    require_same(onward.model, expected("fp32"))
    assert ctxext.describe(onward.model).method is None


@pytest.mark.slow
def test_a_checkpoint_that_says_its_quantisation(rounding: list[dict[str, Any]], tmp_path: Path) -> None:
    place = saved(AutoModelForCausalLM.from_pretrained(saved(tiny(), tmp_path / "model")), tmp_path / "said")
    config = transformers.LlamaForCausalLM.config_class.from_pretrained(place)
    config.quantization_config = {"quant_method": "rounding", "steps": 4}
    config.save_pretrained(place)
    rounded = plain(place, "fp32")
    assert not torch.equal(rounded.lm_head.weight, plain(tmp_path / "model", "fp32").lm_head.weight)
    require_same(load_checkpoint(str(place), device="cpu", dtype="fp32").model, rounded)
    extended = ctxext.patch(rounded, "yarn", factor=2.0)
    require_same(ctxext.load(place, "yarn", factor=2.0, dtype=torch.float32), extended)


@pytest.mark.parametrize(("model_type", "method"), [("t5gemma", "yarn"), ("umt5", "stretch_buckets")])
@pytest.mark.nightly
def test_an_encoder_decoder_that_was_saved_extended_is_refused_by_name(
    model_type: str, method: str, tmp_path: Path
) -> None:
    """A plain one has no causal class; an extended one is loaded as what it is, and cannot be measured or trained."""
    model = ctxext.patch(tiny(model_type), method, factor=2, trained_length=TRAINED_LENGTH)
    ctxext.save(model, tmp_path)
    said = rf"{tmp_path.name} holds a {type(model).__name__}, an encoder-decoder\."
    with pytest.raises(IncompatibleError, match=said):
        load_checkpoint(str(tmp_path))
    said = "does not support encoder-decoders" if model_type == "t5gemma" else said
    with pytest.raises(IncompatibleError, match=said):
        trained(tmp_path, "--trained_length", str(TRAINED_LENGTH))


@pytest.mark.parametrize("place", ["blob", "."])
def test_a_gguf_file_is_known_by_its_beginning_and_in_a_directory(place: str, gguf_file: Path, tmp_path: Path) -> None:
    shutil.copy(gguf_file, tmp_path / ("blob" if place == "blob" else "it.gguf"))
    given: dict[str, Any] = {"method": "yarn", "factor": 2.0, "dtype": torch.float32}
    require_same(ctxext.load(tmp_path / place, **given), ctxext.load(gguf_file, **given))
    patch_checkpoint(tmp_path / place, tmp_path / "new", "yarn", factor=2.0)
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / place)])
    assert (inspected.exit_code, "--method yarn --factor 2" in inspected.output) == (0, True), inspected.output


def test_two_gguf_files_in_a_directory_are_no_checkpoint(gguf_file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"has no config\.json \(found: a\.gguf, b\.gguf\)"):
        ctxext.load(tmp_path, "yarn", factor=2.0)
    _, how = gguf_inside(tmp_path, {"gguf_file": "a.gguf"})
    if hasattr(transformers, "GgufConfig"):
        assert how["quantization_config"].dequantize, "transformers would leave its weights packed where it can"
    given: dict[str, Any] = {"method": "yarn", "factor": 2.0, "dtype": torch.float32}
    require_same(ctxext.load(tmp_path, gguf_file="b.gguf", **given), ctxext.load(gguf_file, **given))


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "method"), [("bloom", "pi"), ("mpt", "dynamic_pi"), ("llama", "self_extend")])
def test_the_tokenizer_beside_a_config_that_transformers_refuses(model_type: str, method: str, tmp_path: Path) -> None:
    """A sentence stands in place of a number, and transformers reads the config before the tokenizer."""
    model = ctxext.patch(tiny(model_type), method, factor=2, trained_length=TRAINED_LENGTH)
    saved(model, tmp_path)
    (tmp_path / "text.txt").write_text("abc " * 100)
    assert read_tokenizer(tmp_path)("abc").input_ids == make_tokenizer(bos=True)("abc").input_ids
    inspect = ["inspect", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--json"]
    assert CliRunner().invoke(app, inspect).exit_code == 0


@pytest.mark.slow
def test_the_chat_template_that_a_processor_alone_has_is_the_tokenizers_too(tmp_path: Path) -> None:
    """Checkpoints that read images held it in a file of its own, which no tokenizer reads (LLaVA 1.5)."""
    saved(tiny(), tmp_path)
    assert read_tokenizer(tmp_path).chat_template is None
    for content in ('{"chat_template": 7}', "{}"):
        (tmp_path / "chat_template.json").write_text(content)
        assert read_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    tokenizer = read_tokenizer(tmp_path)
    said = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "a!"
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert read_tokenizer(tmp_path).chat_template == "its own"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not valid JSON"):
        read_tokenizer(tmp_path)
