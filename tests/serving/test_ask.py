"""Questions about a text: the text is read once, and each answer is that of ``generate`` on the whole prompt."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import peft
import pytest
import torch
from transformers import BertModel, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
from typer.testing import CliRunner

import ctxext
from ctxext.cli.app import app
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.serving.ask import UNSURE, ReadText, prompt_of
from ctxext.serving.selected import LEFT_OUT, select
from scripts.studies import lookups, unsure
from tests._checkpoints import save_with_tokenizer
from tests._models import bert, byte_model, qwen2_vl, tiny, trained_for
from tests._programs import ROOT, command
from tests._tokenizer import BYTES, make_tokenizer
from tests.serving._asking import CHECKPOINT_SAYS, in_eager_graphs, take_a_step_more, takes_graphs
from tests.texts._conversations import PARTS

QUESTIONS = ["Who came?", "And when, and with whom, did they go?"]
TEXT = "The ship came in at dawn with Ada on board. " * 5
TRAINED, NEW = 64, 6


def model(method: str | None = None, *, factor: float = 8, **parameters: Any) -> Any:
    """A model of bytes, trained for 64 tokens, and extended."""
    made = trained_for(byte_model(), TRAINED)
    return made if method is None else ctxext.patch(made, method, factor=factor, **parameters)


def whole(answering: Any, tokenizer: Any, text: str, question: str) -> str:
    """The answer to a prompt that is read in one call."""
    prompt = torch.tensor([prompt_of(tokenizer, text, question)])
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW, "do_sample": False}
    written = answering.generate(input_ids=prompt, **how)
    return str(tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


METHODS: list[tuple[str, dict[str, Any]]] = [("yarn", {}), ("self_extend", {}), ("streaming", {})]
METHODS += [("retrieval_heads", {"heads": [0, 3]}), ("dynamic_ntk", {"growth": "doubling"})]
METHODS += [("dynamic_yarn", {"growth": "request"})]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "parameters"), METHODS, ids=[method for method, _ in METHODS])
def test_each_answer_is_that_of_the_whole_prompt(
    method: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxext.serving.ask.CHUNK", 16)
    extended = model(method, **parameters)
    answers = ctxext.ask(extended, BYTES, TEXT, QUESTIONS, max_new_tokens=NEW)
    assert answers == [whole(extended, BYTES, TEXT, question) for question in QUESTIONS]


def test_the_text_is_read_once_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.serving.ask.CHUNK", 64)
    text, chunks, calls = ReadText(model("yarn"), BYTES, TEXT, QUESTIONS, NEW), list[int](), Mock(return_value=None)
    text.read(chunks.append)
    assert chunks == [64, 64, 64, len(text.shared) - 192]
    text.model.register_forward_pre_hook(calls, with_kwargs=True)
    for question in QUESTIONS:
        text.ask(question)
    read = sum(call.args[2]["input_ids"].shape[1] for call in calls.call_args_list)
    assert read < 2 * (len(max(QUESTIONS, key=len)) + 40)


def test_a_question_that_joins_the_text_is_read_with_it() -> None:
    """Where a tokenizer gives other tokens before the question, nothing of the cache is used."""
    text = ReadText(model("yarn"), BYTES, TEXT, (), NEW)
    text.read()
    text.text = TEXT.lower()
    assert text.ask(QUESTIONS[0]) == whole(text.model, BYTES, TEXT.lower(), QUESTIONS[0])


def test_texts_beyond_the_window_are_refused_or_cut() -> None:
    extended = model("yarn")
    with pytest.raises(InvalidParameterError, match="the model's window has 512"):
        ctxext.ask(extended, BYTES, [TEXT, TEXT, TEXT], QUESTIONS, max_new_tokens=NEW)
    text = ReadText(extended, BYTES, 3 * TEXT, QUESTIONS, NEW)
    over = text.needed - 512
    assert text.cut() == over > 0
    assert text.text == (3 * TEXT)[over:]
    assert text.needed == 512
    text.read()
    with pytest.raises(InvalidParameterError, match="the model's window has 512"):  # a question that nobody knew of
        text.ask(max(QUESTIONS, key=len) * 2)
    with pytest.raises(InvalidParameterError, match="no room for a text"):
        ReadText(extended, BYTES, "short", QUESTIONS, 500).cut()


@pytest.mark.parametrize("given", [0, -1, True])
def test_a_number_of_tokens_to_write_or_select_that_is_none_is_refused(given: Any) -> None:
    for ask in (ctxext.ask, lambda *asked, **how: ctxext.read(*asked[:3], **how)):
        with pytest.raises(
            InvalidParameterError, match=r"^max_new_tokens must be a positive whole number of tokens, fou"
        ):
            ask(model("yarn"), BYTES, TEXT[:50], QUESTIONS, max_new_tokens=given)
    with pytest.raises(InvalidParameterError, match=r"^select must be (a positive whole number|at least 256 tokens)"):
        ctxext.ask(model("yarn"), BYTES, TEXT[:50], QUESTIONS, max_new_tokens=NEW, select=given)


def _pipeline(answering: Any) -> Any:
    return pipeline("text-generation", model=answering, tokenizer=BYTES)


class Processor:
    """Of a model that reads images too: what it is called with first are these."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template

    def __call__(self, images: Any = None, text: Any = None) -> Any:
        raise ValueError("no images")


@pytest.mark.parametrize(
    "holder", [torch.nn.DataParallel, torch.compile, _pipeline], ids=["copies", "compiled", "pipe"]
)
def test_what_holds_a_model_or_a_tokenizer_answers_as_it_does(holder: Any) -> None:
    extended = model("self_extend")
    expected = ctxext.ask(extended, BYTES, TEXT, QUESTIONS, max_new_tokens=NEW)
    for tokenizer in (BYTES, Processor(BYTES)):
        assert ctxext.ask(holder(extended), tokenizer, TEXT, QUESTIONS, max_new_tokens=NEW) == expected
        text = ctxext.read(holder(extended), tokenizer, TEXT, max_new_tokens=NEW)
        assert [text.ask(question) for question in QUESTIONS] == expected


@pytest.mark.parametrize("made", [bert, lambda: bert(BertModel), lambda: tiny("t5")], ids=["head", "none", "t5"])
def test_a_model_that_goes_on_from_no_text_is_refused(made: Any) -> None:
    for ask in (ctxext.ask, lambda *asked, **how: ctxext.read(*asked[:3], **how)):
        with pytest.raises(IncompatibleError, match=r"does not go on from a text that it reads.* a causal language mo"):
            ask(made(), BYTES, TEXT[:20], QUESTIONS, max_new_tokens=NEW)


def test_dropout_answers_nothing(tmp_path: Path) -> None:
    """Activation checkpointing in training would leave the cache, and a file of it, empty."""
    extended = model("yarn")
    text = ctxext.read(extended, BYTES, TEXT, max_new_tokens=NEW)
    extended.train().gradient_checkpointing_enable()
    for ask in (
        lambda: ctxext.ask(extended, BYTES, TEXT, QUESTIONS, max_new_tokens=NEW),
        lambda: ctxext.read(extended, BYTES, TEXT, keep=tmp_path / "kept.safetensors", max_new_tokens=NEW),
        lambda: text.ask(QUESTIONS[0]),
        lambda: list(text.stream(QUESTIONS[0])),
    ):
        with pytest.raises(IncompatibleError, match=r"LlamaForCausalLM is in training mode.* Call model\.eval\(\)"):
            ask()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"texts": Path("novel.txt")}, r"^texts holds PosixPath\('novel\.txt'\), which is not a text \(str\)\. Give"),
        ({"texts": [TEXT, Path("novel.txt")]}, r"^texts holds PosixPath.*, which is not a text"),
        ({"texts": {"novel": TEXT[:20]}}, r"^texts holds \{'novel': "),
        ({"texts": [{"text": TEXT[:20]}]}, r"^texts holds \{'text': .* a data set as its column of texts"),
        ({"texts": TEXT.encode()}, r"^texts holds b'"),
        ({"texts": None}, r"^texts holds None"),
        ({"texts": __file__}, r"^texts holds .* the name of a file and not its text\. Give pathlib\.Path\("),
        ({"texts": [TEXT, __file__]}, r"^texts holds .* the name of a file and not its text"),
        ({"questions": {"first": "Who came?"}}, r"^questions holds \{"),
        ({"questions": [None]}, r"^questions holds None"),
        ({"tokenizer": "smol"}, r"found 'smol'\. Load it: AutoTokenizer\.from_pretrained\('smol'\)"),
        ({"tokenizer": None}, r"must be a tokenizer or processor of transformers, found None\."),
    ],
)
def test_what_holds_no_text_and_no_tokenizer_is_refused(given: dict[str, Any], says: str) -> None:
    """The keys of a dictionary, and the name of a file, were read as the text."""
    asked = {"tokenizer": BYTES, "texts": TEXT, "questions": QUESTIONS} | given
    for most in (None, 256):
        with pytest.raises(InvalidParameterError, match=says):
            ctxext.ask(model("yarn"), **asked, max_new_tokens=NEW, select=most)
    del asked["questions"]
    if "questions" not in given:
        with pytest.raises(InvalidParameterError, match=says):
            ctxext.read(model("yarn"), **asked, max_new_tokens=NEW)


def test_texts_and_questions_may_come_one_by_one() -> None:
    extended, parts = model("yarn"), [TEXT[:60], TEXT[60:90]]
    expected = ctxext.ask(extended, BYTES, "\n\n".join(parts), QUESTIONS, max_new_tokens=NEW)
    for several in (iter, tuple, np.array):
        assert ctxext.ask(extended, BYTES, several(parts), several(QUESTIONS), max_new_tokens=NEW) == expected
    foreign = ["\ufeffa line\r\nand one\rmore", "the end"]
    assert ctxext.read(extended, BYTES, foreign, max_new_tokens=NEW).text == "a line\nand one\nmore\n\nthe end"


@pytest.mark.parametrize("letter", ["\U0001f600", "漢", "é"])
def test_no_cut_goes_through_a_letter(letter: str) -> None:
    """Of bytes: all tokens of a letter begin at the same place."""
    text = ReadText(model("yarn"), BYTES, letter + "x" * 400, QUESTIONS[:1], NEW)
    text.text += "x" * (513 - text.needed)
    assert text.needed - 512 == 1
    assert text.cut() >= 1
    assert set(text.text) == {"x"}
    assert text.needed <= 512


@pytest.mark.parametrize(("text", "completes"), [("", True), ("H", True), ("", False)])
def test_next_to_no_text(text: str, completes: bool) -> None:
    read = ReadText(model(), BYTES, text, (), NEW, completes)
    prompt = torch.tensor([prompt_of(BYTES, text, "Who", completes=completes)])
    tokens = read.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    written = BYTES.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
    assert read.ask("Who") == (written.partition("\n")[0] if completes else written).strip()


# For stop strings transformers takes the tokenizer too, and raised an error of its own without it.
@pytest.mark.parametrize(
    "says", [*CHECKPOINT_SAYS, {"stop_strings": ["never said"]}], ids=lambda says: next(iter(says))
)
def test_what_the_checkpoint_says_of_generating_changes_no_answer(says: dict[str, Any]) -> None:
    extended = model("yarn")
    expected = [whole(extended, BYTES, TEXT, question) for question in QUESTIONS]
    for name, value in says.items():
        setattr(extended.generation_config, name, value)
    assert ctxext.ask(extended, BYTES, TEXT, QUESTIONS, max_new_tokens=NEW) == expected


def test_a_token_that_the_model_lacks_is_named_before_it_is_read() -> None:
    """Tokens that were added for a chat, to a tokenizer alone."""
    tokenizer = make_tokenizer(bos=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidParameterError, match="has token 257 of its tokenizer, and this llama knows 257 tokens"):
        ctxext.ask(model("yarn"), tokenizer, TEXT[:50], QUESTIONS, max_new_tokens=NEW)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_plain_model_whose_positions_follow_the_length_reads_each_prompt_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Phi-3's do: a text in chunks, or behind a shorter one, would have the positions of a short text in part."""
    monkeypatch.setattr("ctxext.serving.ask.CHUNK", 16)

    def made() -> Any:
        config = byte_model().config
        config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
        config.max_position_embeddings = TRAINED
        if kind == "longrope":
            sets = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": TRAINED}
            config.rope_parameters |= sets
            config.max_position_embeddings = 8 * TRAINED
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()

    texts = [TEXT, TEXT[:60]]
    expected = [[whole(made(), BYTES, text, question) for question in QUESTIONS] for text in texts]
    answering = made()
    monkeypatch.setattr(ReadText, "window", 8 * TRAINED)
    assert [ctxext.ask(answering, BYTES, text, QUESTIONS, max_new_tokens=NEW) for text in texts] == expected


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_an_adapter_of_virtual_tokens_has_them_before_each_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.serving.ask.CHUNK", 16)
    torch.manual_seed(1)
    given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
    adapted = peft.get_peft_model(model("yarn"), getattr(peft, f"{kind}Config")(**given)).eval()
    expected = [whole(adapted, BYTES, TEXT[:60], question) for question in QUESTIONS]
    assert ctxext.ask(adapted, BYTES, TEXT[:60], QUESTIONS, max_new_tokens=NEW) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shares"),
    [("zamba", False), ("mamba", False), ("minimax", False), ("rwkv", False), ("falcon_h1", True), ("lfm2", True)],
)
def test_a_recurrent_model_answers_as_from_the_whole_prompt_or_is_refused(
    kind: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxext.serving.ask.CHUNK", 16)
    recurrent = tiny(kind, vocab_size=300, max_position_embeddings=512)
    if not shares:
        with pytest.raises(IncompatibleError, match="in a form of its own, so that its text cannot be read once"):
            ctxext.ask(recurrent, BYTES, TEXT, QUESTIONS, max_new_tokens=NEW)
        return
    expected = [whole(recurrent, BYTES, TEXT, question) for question in QUESTIONS]
    assert ctxext.ask(recurrent, BYTES, TEXT, QUESTIONS, max_new_tokens=NEW) == expected


@pytest.mark.parametrize("left", [[[-40]], [[0]] * 4], ids=["of an image", "of a batch"])
def test_a_text_that_was_read_is_not_moved_by_images_of_another(left: list[list[int]]) -> None:
    """Qwen2-VL's generate() leaves behind how far they moved what follows them, a number for each row."""
    answering: Any = ctxext.patch(qwen2_vl(), "yarn", factor=8)
    text = ctxext.read(answering, BYTES, TEXT, max_new_tokens=NEW)
    expected = text.ask(QUESTIONS[0]), text.probability
    answering.model.rope_deltas = torch.tensor(left)
    assert (text.ask(QUESTIONS[0]), text.probability) == expected
    assert answering.model.rope_deltas.tolist() == left, "whoever goes on from that text needs it"


def test_a_template_that_takes_no_question_is_an_error_with_a_way_out() -> None:
    words = make_tokenizer(bos=False)
    for template in ("{{ raise_exception('system first') }}", {"tool_use": "x"}):
        words.chat_template = template
        with pytest.raises(InvalidParameterError, match=r"does not take a question: .* complete a line"):
            ctxext.ask(model(), words, TEXT[:20], QUESTIONS, max_new_tokens=NEW)


def test_a_chat_template_of_a_processor_writes_text_and_question() -> None:
    """It may go over parts of a message alone, and the tokenizer of the processor may have none."""
    words, alone = make_tokenizer(bos=False), make_tokenizer(bos=False)
    processor = Processor(alone)
    template = f"{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ {PARTS} }}}}{{% endfor %}}"
    words.chat_template = processor.chat_template = template
    asked = BYTES.decode(prompt_of(words, "It rains.", "Where?"))
    assert asked == "[user]It rains.\n\nAnswer from the text above: Where?"
    for given in (words, processor):
        read = ctxext.read(model("yarn"), given, TEXT[:88], max_new_tokens=NEW).shared
        assert BYTES.decode(read).startswith(f"[user]{TEXT[:88]}")
    assert alone.chat_template is None


def test_a_tokenizer_in_python_cannot_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(InvalidParameterError, match=r"is written in Python .* Cut the text to 512 tokens yourself"):
        ReadText(model("yarn"), BYTES, 3 * TEXT, QUESTIONS, NEW).cut()


def test_a_line_is_completed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    extended = model("yarn")
    prompt = torch.tensor([BYTES(f"{TEXT}\nThe ship")["input_ids"]])
    tokens = extended.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
    written = BYTES.decode(tokens[0, prompt.shape[1] :])
    end = next(letter for letter in written[20:] if letter.isascii() and letter.isalpha())
    monkeypatch.setattr("ctxext.serving.ask.LINE_END", end)  # a random model ends no lines
    text = ReadText(extended, BYTES, TEXT, (), 200, completes=True)
    assert text.ask("The ship") == written[: written.index(end) + 1].strip()


@pytest.mark.parametrize(("length", "factor"), [(10, None), (120, 3), (1000, 4), (70, 2)])
def test_a_plain_model_is_extended_as_far_as_the_text_needs(length: int, factor: int | None) -> None:
    text = ReadText(model(), BYTES, "a" * length, ["Who?"], 10)
    text.extend()
    description = ctxext.describe(text.model)
    assert (description.method or {}).get("method") == (None if factor is None else "self_extend")
    assert text.window == TRAINED * (factor or 1)


def test_at_the_command_line(tmp_path: Path) -> None:
    place, folder = save_with_tokenizer(model(), tmp_path / "model", BYTES), tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(TEXT[:50])
    given = ["ask", place, "-t", folder, QUESTIONS[0], "-q", QUESTIONS[1], "--tokens", NEW, "--dtype", "fp32"]
    found = command(*given, "--json", code=0)
    read = f"# a\n\n{TEXT[:50]}\n\n# b\n\n{TEXT[:50]}"
    extended = model("self_extend", factor=3)
    expected = [whole(extended, BYTES, read, question) for question in QUESTIONS]
    told = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(line["question"], line["answer"]) for line in told] == list(zip(QUESTIONS, expected, strict=True))
    assert all(line["unsure"] is (line["probability"] < UNSURE) for line in told)
    assert f"self_extend, reads {len(prompt_of(BYTES, read, QUESTIONS[1]))} of 192 tokens" in found.stderr
    assert "finds what is written, and understands little" in found.stderr


@pytest.mark.parametrize(
    "given", [["What is this? "], ["Explain src/app.py"], ["Why?"], ["-q", "x = \t "], ["Who", "-q", "What is it? "]]
)
def test_a_sentence_alone_is_the_question(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked of the checkpoint that is asked without one, and without the space at its end."""
    save_with_tokenizer(model(), tmp_path / "model", BYTES)
    (tmp_path / "a.txt").write_text(TEXT[:50])
    monkeypatch.setattr("ctxext.measuring.checkpoint.default_checkpoint", lambda: tmp_path / "model")
    monkeypatch.setattr(ReadText, "ask", lambda text, question, streamer=None: asked.append(question) or "")
    asked: list[str] = []
    checkpoint = [tmp_path / "model"] if given[0] == "Who" else []
    told = command("ask", *checkpoint, *given, "-t", tmp_path / "a.txt", "--tokens", NEW, code=0)
    assert asked == [words.rstrip() for words in given if words != "-q"]
    assert told.stderr.count("(no answer)") == len(asked)


def test_a_question_in_another_encoding_is_asked_with_marks_in_its_place(tmp_path: Path) -> None:
    """Python keeps such bytes of a command line in a form that no tokenizer takes, and stops at them in typed lines."""
    save_with_tokenizer(model(), tmp_path / "model", BYTES)
    (tmp_path / "a.txt").write_text(TEXT[:50])
    given = ["ask", tmp_path / "model", "-t", tmp_path / "a.txt", "--tokens", NEW]
    told = command(*given, os.fsdecode(b"Qui est all\xe9?"), "--json", code=0)
    assert json.loads(told.stdout)["question"] == "Qui est all??"
    typed = CliRunner().invoke(app, [*map(str, given), "-m", "yarn", "-f", "8"], input=b"Qui est all\xe9?\n\n")
    assert (typed.exit_code, typed.exception) == (0, None)


@pytest.mark.parametrize("given", ["./my model", "a b.gguf", "smolm2", "/no such/place", "../no such"])
def test_a_path_alone_is_no_question(given: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    told = command("ask", given, "-t", tmp_path / "a.txt")
    assert (told.exit_code, given.split("/")[-1] in told.stderr) == (1, True), told.stderr
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert "A question is empty" in command("ask", tmp_path, "  ", "-t", tmp_path / "a.txt").stderr


def test_a_text_without_words_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "folder").mkdir()
    for name in ("empty.txt", "folder"):
        found = command("ask", tmp_path, "-t", tmp_path / name, "Who?", code=1)
        assert "no text" in found.stderr


def test_a_window_of_attention_is_lifted_as_is_advised(tmp_path: Path) -> None:
    save_with_tokenizer(tiny("mistral", vocab_size=257, sliding_window=32), tmp_path / "model", BYTES)
    (tmp_path / "text.txt").write_text("a" * 100)
    given = ["ask", tmp_path / "model", "-t", tmp_path / "text.txt", "Who?", "--tokens", NEW, "--dtype", "fp32"]
    assert "--sliding-window lift" in command(*given).stderr
    found = command(*given, "--sliding-window", "lift", code=0)
    assert "self_extend, reads" in found.stderr


def test_questions_are_typed_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_tokenizer(model(), tmp_path / "model", BYTES)
    (tmp_path / "a.txt").write_text("x" * 400)
    typed = iter([QUESTIONS[0], "x" * 600, QUESTIONS[1], ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    told = command("ask", tmp_path / "model", "-t", tmp_path / "a.txt", "--tokens", NEW, "-m", "yarn", "-f", 8, code=0)
    assert "of the text are left out: they exceed the window" in told.stderr
    assert "Text, question and answer take" in told.stderr, "a question that is too long ends nothing"
    assert re.search(r"\(unsure, 0\.\d\d: this model may be too small, or the text may not say\)", told.stderr)
    assert len(told.stdout.splitlines()) >= 2
    refused = command("ask", tmp_path / "model", "-t", "-", code=1)
    assert "-t - reads all that is typed as text. Give a question." in refused.stderr


KEPT: list[tuple[str | None, dict[str, Any]]] = [(None, {"factor": 1}), *METHODS[:4]]


@pytest.mark.parametrize(("method", "parameters"), KEPT, ids=[str(method) for method, _ in KEPT])
def test_what_was_read_goes_on_from_a_file(method: str | None, parameters: dict[str, Any], tmp_path: Path) -> None:
    """By another model object, with the same text and with one that has grown."""
    extended = model(method, **parameters)
    text = TEXT[:120] if method else TEXT[:20]
    extended.config.max_position_embeddings = 512
    first = ctxext.read(extended, BYTES, text, max_new_tokens=NEW)
    expected = [first.ask(question) for question in QUESTIONS]
    first.save(tmp_path / "kept.safetensors")
    again = model(method, **parameters)
    again.config.max_position_embeddings = 512
    read = list[int]()
    again.register_forward_hook(
        lambda _, given, named, __: read.append(named["input_ids"].shape[1] if named else 0), with_kwargs=True
    )
    for more in ("", "And they went on, all of them. "):
        read.clear()
        second = ctxext.read(again, BYTES, text + more, keep=tmp_path / "kept.safetensors", max_new_tokens=NEW)
        assert sum(read) <= (len(more) + 20 if more else 0)  # a prompt goes on after the text
        answers = [second.ask(question) for question in QUESTIONS]
        assert answers == (expected if not more else [whole(again, BYTES, text + more, q) for q in QUESTIONS])
        assert "".join(second.stream(QUESTIONS[0])).strip() == answers[0]


def _with_adapters() -> Any:
    """A model with two adapters that change what it answers, of which the first is in use."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model("self_extend"), peft.LoraConfig(init_lora_weights=False, r=8, lora_alpha=64))
    adapted.add_adapter("second", peft.LoraConfig(init_lora_weights=False, r=8, lora_alpha=128))
    return adapted.eval()


CHANGES: dict[str, Callable[[Any], object]] = {
    "switched": lambda adapted: adapted.set_adapter("second"),
    "disabled": lambda adapted: adapted.base_model.disable_adapter_layers(),
    "merged": lambda adapted: adapted.merge_adapter(),
    "merged with another": lambda adapted: adapted.merge_adapter(["second"]),
    "scaled": lambda adapted: [layer.scale_layer(9) for layer in adapted.modules() if hasattr(layer, "scale_layer")],
    "trained": lambda adapted: [weight.data.mul_(1.5) for weight in adapted.parameters() if weight.requires_grad],
    "patched": lambda adapted: ctxext.patch(ctxext.unpatch(adapted), "yarn", factor=8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_reads_its_text_again(change: str, tmp_path: Path) -> None:
    """A text that was read by an adapter, and a question by another; in one process, and with a file."""
    adapted, kept = _with_adapters(), tmp_path / "kept.safetensors"
    text = ctxext.read(adapted, BYTES, TEXT[:120], keep=kept, max_new_tokens=NEW)
    text.keep, before = None, text.ask(QUESTIONS[0])
    CHANGES[change](adapted)
    expected = whole(adapted, BYTES, TEXT[:120], QUESTIONS[0])
    assert (text.ask(QUESTIONS[0]), text.ask(QUESTIONS[0])) == (expected, expected)
    assert expected != before or change == "merged", "this change changes nothing"
    with pytest.raises(CheckpointError, match=r"kept\.safetensors was written with"):
        ctxext.read(adapted, BYTES, TEXT[:120], keep=kept, max_new_tokens=NEW)


@takes_graphs
@pytest.mark.slow
@pytest.mark.usefixtures("_without_checker")
@pytest.mark.parametrize("compiles", [False, True])
def test_what_was_read_in_inference_mode_is_asked_outside(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.serving.ask.as_graphs", in_eager_graphs)
    torch._dynamo.reset()
    extended = model("yarn")
    with torch.inference_mode():
        text = ctxext.read(extended, BYTES, TEXT[:120], compiles=compiles, max_new_tokens=NEW)
    answers = [text.ask(question) for question in QUESTIONS]
    assert answers == [whole(extended, BYTES, TEXT[:120], question) for question in QUESTIONS]


@takes_graphs
@pytest.mark.slow
@pytest.mark.usefixtures("_without_checker")
@pytest.mark.parametrize(("method", "parameters"), METHODS[:4], ids=[method for method, _ in METHODS[:4]])
def test_steps_as_graphs_give_the_same_answers(
    method: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text, of a question longer than those that were known, and of a prompt that does not begin like the text."""
    monkeypatch.setattr("ctxext.serving.ask.as_graphs", in_eager_graphs)
    monkeypatch.setattr("ctxext.serving.ask.CHUNK", 64)
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    extended = model(method, **parameters)
    text = ctxext.read(extended, BYTES, TEXT[:120], compiles=True, max_new_tokens=NEW)
    asked = [*QUESTIONS, QUESTIONS[0], "x" * 300]
    assert [text.ask(question) for question in asked[:3]] == [whole(extended, BYTES, TEXT[:120], q) for q in asked[:3]]
    assert (counted["stats"]["unique_graphs"], dict(counted["graph_break"])) == (1, {})
    assert text.ask(asked[3]) == whole(extended, BYTES, TEXT[:120], asked[3])
    text.text = TEXT[:120].lower()
    assert text.ask(asked[0]) == whole(extended, BYTES, TEXT[:120].lower(), asked[0])
    with pytest.raises(InvalidParameterError, match="graphs need a fixed one"):
        text.save("kept.safetensors")


@takes_graphs
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: model("dynamic_ntk"), "follow its length"),
        (lambda: tiny("mistral", vocab_size=257, sliding_window=32), "hold a window of the text only"),
        (lambda: tiny("mamba", vocab_size=257), "keep a state of all that they have read"),
    ],
)
def test_steps_that_are_no_graphs(made: Callable[[], Any], says: str) -> None:
    with pytest.raises(IncompatibleError, match=f"cannot run as graphs: .*{says}"):
        ctxext.read(made(), BYTES, TEXT[:20], compiles=True, max_new_tokens=NEW)


def test_a_step_more_than_there_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ctxext.read(model("self_extend"), BYTES, TEXT[:120], max_new_tokens=NEW)
    expected = [(text.ask(question), round(text.probability, 5)) for question in QUESTIONS]
    take_a_step_more(monkeypatch)
    assert [(text.ask(question), round(text.probability, 5)) for question in QUESTIONS] == expected


def test_an_answer_has_the_mean_probability_of_its_tokens() -> None:
    text = ctxext.read(model("yarn"), BYTES, TEXT[:120], max_new_tokens=NEW)
    text.ask(QUESTIONS[0])
    prompt = torch.tensor([prompt_of(BYTES, TEXT[:120], QUESTIONS[0])])
    written = text.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    chances = text.model(written).logits[0, prompt.shape[1] - 1 : -1].softmax(-1)
    expected = chances.gather(1, written[0, prompt.shape[1] :, None]).mean()
    assert text.probability == pytest.approx(float(expected), abs=1e-4)
    text.probability = 0.99
    assert not text.is_unsure
    text.probability = 0.01
    assert text.is_unsure


def test_an_answer_out_of_nan_is_refused_and_not_called_sure() -> None:
    broken = model("yarn")
    text = ctxext.read(broken, BYTES, TEXT[:120], max_new_tokens=NEW)
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.nan
    said = r"^LlamaForCausalLM gives NaN instead of prob.* fp32 has the range"
    for answer in (text.ask, lambda question: ctxext.ask(broken, BYTES, TEXT[:120], question, max_new_tokens=NEW)):
        with pytest.raises(IncompatibleError, match=said):
            answer(QUESTIONS[0])


def test_the_limit_of_what_is_unsure_is_what_the_look_ups_chose() -> None:
    answers = unsure.read_rows(ROOT / "docs" / "evidence" / "unsure.csv")
    choosing, judging = unsure.halves(answers)
    assert unsure.chosen_limit(choosing) == UNSURE
    page = (ROOT / "docs" / "guides" / "howto" / "question.md").read_text(encoding="utf-8")
    asked = lookups.read_rows(ROOT / "docs" / "evidence" / "lookups.csv")
    tables = [unsure.table(judging, UNSURE), lookups.table(asked)]
    assert all(line in page for one in tables for line in one.splitlines() if line.startswith("| "))


def test_a_file_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    kept = tmp_path / "kept.safetensors"
    ctxext.read(model("self_extend"), BYTES, TEXT[:120], keep=kept, max_new_tokens=NEW)
    changed = model("self_extend")
    changed.model.layers[0].mlp.up_proj.weight.data += 1
    others = {"extension": model("self_extend", factor=7), "weights": changed, "dtype": model("self_extend").bfloat16()}
    for name, other in others.items():
        with pytest.raises(CheckpointError, match=rf"kept\.safetensors was written with {name} .*Name another file"):
            ctxext.read(other, BYTES, TEXT[:120], keep=kept, max_new_tokens=NEW)
    content = kept.read_bytes()
    for damaged in (b"", content[:-8], content[:300], b"x" * 400, content.replace(b"HeldLayer", b"HeldLaxer")):
        kept.write_bytes(damaged)
        if damaged != content:
            with pytest.raises(CheckpointError, match="holds no text that was read"):
                ctxext.read(model("self_extend"), BYTES, TEXT[:120], keep=kept, max_new_tokens=NEW)
    for place, words in {tmp_path: "is a directory", tmp_path / "no" / "a": "there is no directory"}.items():
        with pytest.raises(CheckpointError, match=words):
            ctxext.read(model("self_extend"), BYTES, TEXT[:120], keep=place, max_new_tokens=NEW)
    dynamic = model("dynamic_ntk")
    for keep in (None, tmp_path / "new.safetensors"):  # the second before anything is read
        with pytest.raises(IncompatibleError, match="positions of a text follow its length"):
            ctxext.read(dynamic, BYTES, TEXT[:120], keep=keep, max_new_tokens=NEW).save(kept)


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_no_file_is_kept_of_weights_that_processes_share(method: str, tmp_path: Path) -> None:
    """Their digest is unknown, as that of other shared weights is, and a process may have its own heads' keys only."""
    kept, shared = tmp_path / "kept.safetensors", model(method)
    ctxext.read(model(method), BYTES, TEXT[:120], keep=kept, max_new_tokens=NEW)
    next(shared.parameters()).ds_id = 0  # as DeepSpeed ZeRO-3 does
    before = kept.read_bytes()
    for place in (kept, tmp_path / "other.safetensors"):
        with pytest.raises(IncompatibleError, match="is not written to a file: processes share its weights"):
            ctxext.read(shared, BYTES, TEXT[:120], keep=place, max_new_tokens=NEW)
    with pytest.raises(IncompatibleError, match="processes share its weights"):
        ctxext.read(shared, BYTES, TEXT[:120], max_new_tokens=NEW).save(kept)
    assert kept.read_bytes() == before


def test_a_selection_is_the_beginning_and_what_the_question_speaks_of() -> None:
    """By bytes: chunks of 128 letters, of which one holds the words of the question."""
    tokenizer = make_tokenizer(bos=False)
    fact, filler = "The captain of the brig was Ada Blackwood. ", "rain fell on the grey hills that day, and so on. "
    text = filler * 40 + fact + filler * 40
    (part,) = select(tokenizer, text, ["Who was the captain of the brig?"], 512)
    assert part.text.startswith(text[:128])
    assert "captain of the brig" in part.text
    assert (part.read, part.tokens, len(part.places)) == (512, len(text), 3)
    pieces = [text[0:128], *(text[place : place + 128] for place in part.places)]
    places = itertools.pairwise([0, *part.places])
    gaps = [LEFT_OUT if before + 128 < after else "" for before, after in places]
    assert part.text == pieces[0] + "".join(gap + piece for gap, piece in zip(gaps, pieces[1:], strict=True))
    assert re.match(r"512 of 3,963 tokens are read: the beginning, and 3 chunks from \d+ to \d+ % of", part.sentence)
    (whole,) = select(tokenizer, text, ["Who?"], len(text))
    assert (whole.text, whole.sentence) == (text, "All 3,963 tokens of the text are read.")
    with pytest.raises(InvalidParameterError, match=r"^select must be at least 256 tokens, found 255\.$"):
        select(tokenizer, text, ["Who?"], 255)


def test_the_end_of_a_text_is_found_whatever_its_length() -> None:
    """Chunks of 128 tokens seldom fill a text: what is left at the end is a chunk too."""
    tokenizer = make_tokenizer(bos=False)
    filler, fact = "rain fell on the grey hills that day, and so on. ", "Zoe Quartz won."
    for rest in (15, 60, 127, 0, 1):
        length = 128 * 12 + rest
        text = (filler * 40)[: length - len(fact)] + fact
        (part,) = select(tokenizer, text, ["Zoe Quartz won what?"], 256 + 128)
        assert fact[:-1] in part.text
        assert part.read <= 384
        assert len(tokenizer(part.text).input_ids) <= 384 + 2 * len(LEFT_OUT)


@pytest.mark.slow
def test_a_selection_is_answered_as_a_text_of_its_own() -> None:
    answering, tokenizer, text = trained_for(byte_model(), 600), make_tokenizer(bos=False), TEXT * 20
    parts = [part.text for part in select(tokenizer, text, QUESTIONS, 256)]
    expected = [whole(answering, tokenizer, part, question) for part, question in zip(parts, QUESTIONS, strict=True)]
    assert ctxext.ask(answering, tokenizer, text, QUESTIONS, select=256, max_new_tokens=NEW) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--select", "512", "--keep", "x"], "--keep is for a whole text. Leave --select out"),
        (["--select", "512"], "--select chooses by the question. Leave --select out, or give a question"),
    ],
)
def test_a_selection_needs_a_question(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    question = ["Who?"] * ("--keep" in options)
    refused = command("ask", "demo", "-t", tmp_path / "text.txt", *question, *options)
    assert refused.exit_code == 1
    assert message in " ".join(refused.output.split())
