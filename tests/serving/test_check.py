"""``ctxext check``: a server that computes something else than the extension is found out, whatever it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ctxext
from ctxext.errors import InvalidParameterError, VerificationError
from ctxext.serving.check import AS_SAID, PLAIN, TOP, Client, _top, check_server
from tests._models import byte_model, trained_for
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
        assert found.refused is not None
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


def test_log_probabilities_are_read_in_the_forms_of_vllm_and_llama_cpp() -> None:
    assert _top({"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1, "b": -0.5}]}) == (-0.5, -1)
    content = [{"token": "a", "top_logprobs": [{"logprob": -2.0}, {"logprob": -1.0}]}]
    assert _top({"content": content}) == (-1.0, -2.0)
    assert _top(None) == _top({"content": []}) == _top({"top_logprobs": None}) == ()
