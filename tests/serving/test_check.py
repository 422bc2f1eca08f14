"""``ctxext check``: a server that computes something else than the extension is found out, whatever it computes."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ctxext
from ctxext.errors import InvalidParameterError, VerificationError
from ctxext.serving import check
from ctxext.serving.check import AS_SAID, PLAIN, TOP, Client, _answers, _top, check_server
from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model, trained_for
from tests._programs import command
from tests._tokenizer import make_letters

TRAINED, FACTOR = 64, 4
LETTERS = make_letters()
IDS = torch.randint(1, 256, (1, 300), generator=torch.Generator().manual_seed(5))


class Computing(Client):
    """A server in this process that computes one model, up to a window."""

    def __init__(self, model: Any, *, window: int = 256, text: bool = False) -> None:
        self.model, self.window, self.text = model, window, text
        super().__init__("http://server/v1/")

    @torch.no_grad()
    def _call(self, path: str, body: Any = None) -> tuple[int, Any]:
        if body is None:
            return 200, {"data": [{"id": "the model", "max_model_len": self.window}]}
        if isinstance(body["prompt"], list) == self.text:
            return 422, {"detail": "prompt: another form."}
        ids = torch.tensor([LETTERS(body["prompt"])["input_ids"] if self.text else body["prompt"]])
        if ids.shape[1] + body["max_tokens"] > self.window:
            return 400, {"error": {"message": f"The window is {self.window}."}}
        tokens = self.model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=0)
        logs = self.model(ids).logits[0, -1].log_softmax(-1).topk(TOP)
        told = {"top_logprobs": [{str(i): v for i, v in zip(logs.indices.tolist(), logs.values.tolist(), strict=True)}]}
        choice = {"text": LETTERS.decode(tokens[0, ids.shape[1] :]), "logprobs": None if self.text else told}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": ids.shape[1]}}


def plain(base: float = 500_000.0) -> LlamaForCausalLM:
    """A model whose base is not the usual one."""
    model = byte_model()
    model.config.rope_parameters["rope_theta"] = base
    made = LlamaForCausalLM(model.config)
    made.load_state_dict(model.state_dict())
    return trained_for(made.eval(), TRAINED)


def served(mistake: str) -> Any:
    """A model as a server computes it."""
    extended: dict[str, Any] = {"method": "yarn", "factor": FACTOR}
    match mistake:
        case "temperature ignored":
            extended |= {"attention_factor": 1.0}
        case "every frequency divided by the factor":
            extended["method"] = "pi"
        case "temperature alone":
            ones = (1.0,) * 4
            extended |= {"method": "longrope", "short_factor": ones, "long_factor": ones}
            extended |= {"attention_factor": 0.1 * torch.tensor(FACTOR).log().item() + 1}
        case "another":
            extended = {"method": "ntk", "factor": 2}
    model = plain(10_000.0 if mistake.startswith("base") else 500_000.0)
    return model if mistake == PLAIN else ctxext.patch(model, **extended)


MISTAKES = ["temperature ignored", "temperature alone", "every frequency divided by the factor"]


@pytest.mark.slow
@pytest.mark.parametrize("text", [False, True], ids=["log-probabilities", "text"])
@pytest.mark.parametrize("computed", [AS_SAID, PLAIN, *MISTAKES, "base 10000 in place of 500000", "another"])
def test_what_a_server_computes_is_found_out(computed: str, text: bool) -> None:
    model = ctxext.patch(plain(), "yarn", factor=FACTOR)
    shares: dict[str, float] = {}

    def progress(stage: str, done: float) -> None:
        shares[stage] = shares.get(stage, 0.0) + done

    found = check_server(Computing(served(computed), text=text), model, LETTERS, IDS, progress=progress)
    assert next(iter(shares)).startswith("server, ")
    assert {f"here, {reading}" for reading in found.beyond} < shares.keys()
    assert sum(shares.values()) == pytest.approx(1)
    assert found.computes == (None if computed == "another" else computed), found
    assert found.right == (computed == AS_SAID)
    assert found.compared == ("text" if text else "log-probabilities")
    assert found.beyond.keys() == {AS_SAID, PLAIN, *MISTAKES, "base 10000 in place of 500000"}
    if found.computes:
        assert found.beyond[computed] < 1e-4 < min(value for name, value in found.beyond.items() if name != computed)
    assert (found.accepted, found.refused, found.stated) == (256 if text else 245, None, 256)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["self_extend", "dynamic_ntk", "alibi"])
def test_methods_of_no_table_are_told_from_the_plain_model(method: str) -> None:
    for is_extended in (True, False):
        model, server = plain(), plain()
        ctxext.patch(model, method, factor=FACTOR)
        if is_extended:
            ctxext.patch(server, method, factor=FACTOR)
        found = check_server(Computing(server), model, LETTERS, IDS)
        assert found.computes == (AS_SAID if is_extended else PLAIN), found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "is_read"), [("yarn", True), ("yarn", False), ("llama3", False)])
def test_the_scaling_of_a_stock_config_is_checked_too(method: str, is_read: bool, tmp_path: Path) -> None:
    ctxext.patch(plain(), method, factor=FACTOR).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    del model.config.ctxext
    found = check_server(Computing(model if is_read else plain()), model, LETTERS, IDS)
    assert found.computes == (AS_SAID if is_read else "scaling of the config ignored"), found


@pytest.mark.slow
@pytest.mark.parametrize("window", [64, 100, 255])
def test_the_window_that_a_server_accepts(window: int) -> None:
    model = ctxext.patch(plain(), "yarn", factor=FACTOR)
    server = Computing(ctxext.patch(plain(), "yarn", factor=FACTOR), window=window)
    found = check_server(server, model, LETTERS, IDS)
    assert (found.computes, found.right) == (AS_SAID, window == 255)
    assert found.accepted <= window
    if window < 255:
        assert window < found.refused <= found.accepted + 6
        assert f"The window is {window}." in found.notes[0]


def test_a_text_that_is_too_short_and_a_server_that_refuses_all() -> None:
    model = ctxext.patch(plain(), "yarn", factor=FACTOR)
    with pytest.raises(InvalidParameterError, match="70 tokens, and the trained window 64"):
        check_server(Computing(model), model, LETTERS, IDS[:, :70])
    with pytest.raises(VerificationError, match=r"refuses a prompt of 21 tokens: The window is 3\."):
        check_server(Computing(model, window=3, text=True), model, LETTERS, IDS)
    with pytest.raises(InvalidParameterError, match="has no model 'x': it lists 'the model'"):
        Client.__init__(Computing(model), "http://server", name="x")
    with pytest.raises(VerificationError, match="does not answer as a server of OpenAI's API"):
        Client("http://127.0.0.1:9")
    with pytest.raises(VerificationError, match="unknown url type: ftp"):
        Client("ftp://127.0.0.1:9")


def test_log_probabilities_are_read_in_the_forms_of_vllm_and_llama_cpp() -> None:
    vllm = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1, "b.c": -0.5}]}
    assert _top({"logprobs": vllm}) == (-0.5, -1)
    content = [{"token": "a", "top_logprobs": [{"logprob": -2.0}, {"logprob": -1.0}]}]
    assert _top({"logprobs": {"content": content}}) == (-1.0, -2.0)
    nothing: list[Any] = [None, {}, {"content": []}, {"content": None}]
    for none in [*nothing, {"top_logprobs": None}, {"top_logprobs": [None]}]:
        assert _top({"logprobs": none}) == ()


# What a server of malice or defects may send, beside all that is of another type.
ODD: list[Any] = [None, True, 0, -1, 5, 1e999, float("nan"), 10**400, "", "x", "\ud800", [], [1], [[]], {}, {"a": 1}]
LISTED = {"object": "list", "data": [{"id": "m", "max_model_len": 256, "meta": {"n_ctx": 256}}]}
TOLD = {"choices": [{"text": "一", "logprobs": None}], "usage": {"prompt_tokens": 21}}
OF_VLLM = {"top_logprobs": [{"一": -0.5, "丁": -1.5}]}
OF_LLAMA_CPP = {"content": [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]}]}
RAW = [
    *(b"", b"{", b"[" * 200_000, b'{"a":' * 5_000, b"\xff\xfe{}", b"\x00", b"nothing", b"9" * 5_000),
    b"[" * 99 + b"]" * 99,
]
RAW += [json.dumps(LISTED).encode()[:cut] for cut in (1, 20, 60)] + [json.dumps(LISTED).encode("utf-16")[1:]]


def mutated(value: Any) -> Iterator[Any]:
    """A value with each of its parts in turn another."""
    yield from ODD
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for part in mutated(value[key]):
            whole = copy.copy(value)
            whole[key] = part
            yield whole


class Told(Client):
    def __init__(self, listed: Any, said: Any) -> None:
        self.listed, self.said = listed, said
        super().__init__("http://server")

    def _call(self, path: str, body: Any = None) -> tuple[int, Any]:
        return 200, self.listed if body is None else self.said


@pytest.mark.slow
def test_malformed_answers_are_sentences_and_never_right() -> None:
    """Every part of each answer is another, at every place; many of these a server may well say."""
    model = ctxext.patch(plain(), "yarn", factor=FACTOR)
    forms = [TOLD | {"choices": [{"text": "一", "logprobs": form}]} for form in (None, OF_VLLM, OF_LLAMA_CPP)]
    cases = [(listed, TOLD) for listed in mutated(LISTED)]
    cases += [(LISTED, said) for form in forms for said in mutated(form)]
    sentences = []
    for listed, said in cases:
        try:
            client = Told(listed, said)
            found, _, _ = _answers(client, LETTERS, IDS, [21, 42], lambda _: None)
        except VerificationError as error:
            sentences.append(str(error))
        else:
            assert len(f"{client.name} {client.stated}".encode()) < 500
            assert torch.tensor(found[0].top or found[0].tokens).isfinite().all()
    assert len(cases) > 500
    assert len(sentences) > 300
    assert max(map(len, sentences)) < 400
    assert not check_server(Told(LISTED, forms[1]), model, LETTERS, IDS).right


class Answering(BaseHTTPRequestHandler):
    """A server that says the next bytes of a list to any request, and keeps what it was asked."""

    says: ClassVar[list[bytes]] = []
    asked: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        """Answer, in pieces."""
        self.asked.append((self.headers["Host"], self.path, self.headers["Authorization"]))
        with contextlib.suppress(OSError):
            for piece in self.says:
                self.wfile.write(piece)
                if piece == b"":
                    time.sleep(0.05)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where such a server listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    length = () if any("ength" in line or "ncoding" in line for line in headers) else (f"Content-Length: {len(body)}",)
    return "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *length, *headers, "", ""]).encode("latin-1") + body


@pytest.mark.slow
def test_one_text_is_read_and_no_more(address: str, tmp_path: Path) -> None:
    save_with_tokenizer(plain(), tmp_path / "plain", LETTERS)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": LETTERS.decode(IDS[0])}) + "\nno JSON\n")
    Answering.says = [http(json.dumps(LISTED).encode())]
    asked = ["check", tmp_path / "plain", "--url", address, "-m", "yarn", "-f", FACTOR, "-t", tmp_path / "texts.jsonl"]
    assert "refuses a prompt of 21 tokens" in command(*asked, "--dtype", "fp32", code=1).output


GARBAGE = {
    "no status": b"GARBAGE\r\n\r\n",
    "nothing": b" ",
    "no number": b"HTTP/1.1 two OK\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.9\r\n",
    "a long line": b"HTTP/1.1 200 " + b"a" * 70_000 + b"\r\n\r\n",
    "headers": http(b"{}", *(f"X-{number}: y" for number in range(200))),
    "a long header": http(b"{}", "X: " + "y" * 70_000),
    "escapes": b"\x1b[31mHTTP\r\n\r\n",
    "short": http(b"{}", "Content-Length: 100"),
    "chunks of no length": http(b"zz\r\n{}\r\n", "Transfer-Encoding: chunked"),
    "half a chunk": http(b"64\r\n{}", "Transfer-Encoding: chunked"),
    "zipped": http(gzip.compress(b"{}"), "Content-Encoding: gzip"),
    "protocols": http(b"", status="101 Switching Protocols"),
    "no content": http(b"", status="204 No Content"),
    "another length": http(b"{}", "Content-Length: -5"),
}
GARBAGE |= {
    f"text {number}, {status}": http(text, status=status)
    for number, text in enumerate(RAW)
    for status in ("200 OK", "500 Internal Server Error", "404 Not Found")
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_http_or_no_json_of_openais_is_a_sentence(name: str, address: str) -> None:
    Answering.says = [GARBAGE[name]]
    with pytest.raises(VerificationError, match=f"^({address}|The server's answer is malformed)") as refused:
        Client(address)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("status", ["301 a", "302 Found", "303 c", "307 d", "308 e", "300 f", "304 g"])
def test_a_key_goes_to_no_other_address(status: str, address: str) -> None:
    Answering.asked.clear()
    for elsewhere in (address.replace("127.0.0.1", "localhost"), address, "file:///etc/passwd", "/other", "//x", ""):
        Answering.says = [http(b"{}", f"Location: {elsewhere}/elsewhere", status=status)]
        with pytest.raises(VerificationError, match="redirect"):
            Client(address, key="sesame")
    host = address.removeprefix("http://")
    assert {*Answering.asked} == {(host, "/v1/models", "Bearer sesame")}


def test_an_answer_without_end_is_not_kept(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "BYTES", 1000)
    for length in ("Content-Length: 99999999", "Transfer-Encoding: chunked", "X-Length: none"):
        blanks = b" " * 700
        piece = b"2bc\r\n" + blanks + b"\r\n" if "chunked" in length else blanks
        Answering.says = [http(b"", length) if "X-" not in length else b"HTTP/1.1 200 OK\r\n\r\n", *[piece] * 100]
        with pytest.raises(VerificationError, match="more than 1,000 bytes"):
            Client(address)


@pytest.mark.parametrize(
    "start", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["", "head", "body"]
)
def test_a_trickle_has_one_deadline(start: bytes, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the whole does not."""
    monkeypatch.setattr(check, "SECONDS", 0.2)
    Answering.says = [start, *[b" ", b""] * 40]
    with pytest.raises(VerificationError, match=r"nothing whole in 0\.2 seconds"):
        Client(address)
