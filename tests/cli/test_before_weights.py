"""Mistakes that the config, the tokenizer and the texts show are told before any weights are read."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import ctxext
from ctxext.checkpoints import load
from ctxext.cli import serve
from ctxext.errors import CtxextError
from ctxext.serving import check
from ctxext.training.settings import read_settings
from recipes import finetune
from tests._checkpoints import SHAPE, TRAINED
from tests._programs import command
from tests._tokenizer import make_tokenizer

BAD, GOOD, FAR = "-m hierarchical -f 2", "-m yarn -f 2", f"-l {4 * TRAINED}"
REFUSED, BEYOND, TOO_SHORT = "hierarchical", f"{4 * TRAINED:,} tokens", "tokens asked for; the longest has 10"
ASKED = ("passkey", "ruler", "retrieval")  # by questions about a text
# HERE is a Llama, EXTENDED it after `ctxext patch`, BERT an encoder.
# BARE is HERE without a tokenizer. SHORT is a text, ONE has one token, LONG eight windows.
MISTAKES = {
    **{f"eval {name} HERE {BAD}": REFUSED for name in (*ASKED, "perplexity")},
    **{f"eval {name} HERE {GOOD} {FAR}": BEYOND for name in (*ASKED, "perplexity")},
    **{f"eval {name} HERE {GOOD} -t SHORT": TOO_SHORT for name in ("perplexity", "compare -o OUT")},
    **{f"eval {name} EXTENDED --reference EXTENDED": "is extended itself" for name in (*ASKED, "perplexity -t LONG")},
    f"eval perplexity HERE {GOOD} -t LONG --memory 1MiB": "found --memory",
    "eval masked BERT -m yarn -f 2": "yarn",
    "eval masked BERT -m pi -f 2 -t SHORT": TOO_SHORT,
    "eval masked BERT -m pi -f 2 -l 4096": "4,096 tokens",
    "eval masked BERT -m pi -f 2 -t LONG": "has no mask token, so that its model fills in nothing",
    "choose HERE --target 512 -t SHORT": "No text is as long as the target",
    "choose HERE --target 512 -t LONG --save HERE/new": "new lies inside the checkpoint that it is made from",
    "choose ADAPTER --target 512 -t LONG --save OUT": "ADAPTER holds an adapter and not a whole model",
    "ask HERE what -t LONG --select 1024 --tokens 9": "--select 1024: text, question and answer take 1,0",
    "ask HERE what -q 'which line is it' -t LONG --select 300 -m yarn -f 1 --tokens 9": "window has 256. Select fewer.",
    "inspect HERE --text LONG --text EMPTY": "EMPTY' holds no text. Leave it out.",
    "choose HERE --target 100 -t LONG": "needs no extension",
    "choose HERE --target 512 -t LONG -t LONG --budget '5 passes'": "The budget is too small",
    f"serve HERE --port 0 {BAD}": REFUSED,
    "serve HERE --port 0 -m kerple --continuous-batching": "does not work with continuous batching",
    f"check HERE --url URL {BAD}": REFUSED,
    "check EXTENDED --url URL -t SHORT": TOO_SHORT,
    f"ask HERE what -t LONG {BAD}": REFUSED,
    "ask HERE what -t LONG --tokens 2000": "leaves no room for a text",
    "ask EXTENDED what -t SHORT --tokens 2000": "leaves no room for a text",
    "heads BARE": "has no tokenizer that can be read",
    "heads HERE -t ONE": "Give a longer text, or none",
    "demo --model HERE --method hierarchical --output OUT": REFUSED,
    "demo --model HERE --length 100 --output OUT": "length must be above the trained length",
    "demo --model HERE --text SHORT --output OUT": "SHORT",
    "demo --model HERE --text EMPTY --output OUT": "the text of the demo must be one document, found none in",
    "demo --model HERE --text TWO --output OUT": "the text of the demo must be one document, found more in",
    "demo --model HERE --text LONG --output USED": "unfinished' is not empty and holds no earlier demo",
    "choose HERE --target 512 -t LONG -o USED/unfinished/book.png": "holds no earlier choosing",
    "eval compare HERE -m yarn -f 2 --no-passkey -t LONG -o USED": "USED' is not empty and holds no earlier comparison",
}
OF_THE_RECIPE = {
    "--method hierarchical": REFUSED,
    "--evaluation.text SHORT": TOO_SHORT,
    "--evaluation.passkey_lengths 4096": "4,096 tokens are more than the 512 that this model was extended to, by yarn",
    "--evaluation.passkey_lengths 40": "A prompt for a passkey needs at least",
    "--data.length 8192 --factor 32": "No document has the 8,191 tokens of one sequence; the longest",
    "--data.shortest 8192": "No document has the 8,192 tokens asked for; the longest of 1 has",
    "--data.train EMPTY": "No document with any text in it was found",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the capital words of a command line stand for."""
    place = tmp_path_factory.mktemp("weights")
    tokenizer, shape = make_tokenizer(bos=True), SHAPE | {"vocab_size": 257}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    for name in ("HERE", "BARE"):
        model.save_pretrained(place / name)
    ctxext.save(ctxext.patch(model, "yarn", factor=2), place / "EXTENDED", tokenizer=tokenizer)
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(place / "BERT")
    (place / "ADAPTER").mkdir()
    (place / "ADAPTER" / "adapter_config.json").write_text("{}")
    save_file({}, place / "ADAPTER" / "adapter_model.safetensors")
    for name in ("HERE", "BERT"):
        tokenizer.save_pretrained(place / name)
    for name, text in {"SHORT": "too short", "EMPTY": " ", "ONE": "1"}.items():
        (place / name).write_text(text)
    (place / "LONG").write_text("".join(f"line {number}, like no other\n" for number in range(8 * TRAINED // 16)))
    for used in (place / "USED" / "unfinished", place / "USED" / "unfinished" / "book.rounds", place / "TWO"):
        used.mkdir(parents=True)
        for name in ("one.txt", "two.txt"):
            (used / name).write_text("the only copy")
    with socket.create_server(("127.0.0.1", 0)) as server:
        paths = {path.name: str(path) for path in (*place.iterdir(), place / "OUT")}
        yield paths | {"URL": f"http://127.0.0.1:{server.getsockname()[1]}"}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "read_model", lambda *_, **__: pytest.fail("weights are read"))
    monkeypatch.setattr(check, "Client", lambda *_: None)


def _put(words: str, places: dict[str, str]) -> list[str]:
    parts = [word.partition("/") for word in shlex.split(words)]
    return [places.get(first, first) + slash + rest for first, slash, rest in parts]


@pytest.mark.slow
@pytest.mark.parametrize("words", MISTAKES)
def test_a_command_reads_no_weights(words: str, places: dict[str, str]) -> None:
    done = command(*_put(words, places))
    assert done.exit_code in (1, 2), done.stdout
    assert MISTAKES[words] in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("installed", ["5.16.1", "5.22.0"])
def test_a_transformers_without_the_serving_code_is_named(
    installed: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "require_package", lambda *_: None)
    monkeypatch.setattr(serve, "version", lambda _: installed)
    done = command("serve", places["HERE"], "--port", "0")
    said = " ".join(done.stderr.split())
    assert done.exit_code == 1
    assert f"needs transformers 5.23 or newer, and {installed} is installed. Run `pip install" in said


@pytest.mark.slow
@pytest.mark.parametrize("words", OF_THE_RECIPE)
def test_the_recipe_reads_no_weights(words: str, places: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"output: {tmp_path / 'out'}\ncheckpoint: {places['HERE']}\nextension: {{method: yarn, factor: 2}}\n"
        f"device: cpu\ndata: {{train: [{places['LONG']}], length: 64}}\ntraining: {{steps: 1, learning_rate: 1.0e-4}}\n"
    )
    with pytest.raises(CtxextError) as refused:
        finetune.finetune(read_settings(str(config), _put(words, places)))
    assert OF_THE_RECIPE[words] in str(refused.value)
