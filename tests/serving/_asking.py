"""The server's application in this process: a tiny model, and how a test asks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import CompileConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import StaticLayer
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.generation import utils

from ctxext.measuring.checkpoint import Checkpoint
from ctxext.serving.load import Served
from tests._models import byte_model

if TYPE_CHECKING:
    from starlette.testclient import TestClient

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SPECIAL = ["<s>", "</s>", "<|user|>", "<|tool|>"]
# It shows tools, reads an effort of reasoning, and a name that only it knows.
TEMPLATE = (
    "{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}{% if mood is defined %}{{ mood }}{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
    "{% for message in messages %}{{ '<|user|>' + message.content }}{% endfor %}"
)
SILENT = "{% for message in messages %}{{ '<|user|>' + message.content }}{% endfor %}"

# What a checkpoint's generation_config may say that changes no greedy answer.
SAYS = {"use_cache": False, "cache_implementation": "static", "num_beams": 2, "return_dict_in_generate": True}
SAYS |= {"prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "use_mtp": True, "dola_layers": "low"}
CHECKPOINT_SAYS: list[dict[str, Any]] = [{name: value} for name, value in SAYS.items()]
CHECKPOINT_SAYS += [{"num_return_sequences": 2, "do_sample": True}, {"penalty_alpha": 0.6, "top_k": 4}]
CHECKPOINT_SAYS += [{"token_healing": True}, {"output_attentions": True, "output_hidden_states": True}]


def letters(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each printable letter, and special tokens that no text shows."""
    names = {name: number for number, name in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    inner = Tokenizer(models.WordLevel(names, unk_token="<s>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    return _finished(inner, template)


def bytewise(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte: letters beyond ASCII have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {name: number for number, name in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=names, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return _finished(inner, template)


def in_pieces(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer like SentencePiece's: a space belongs to the word behind it, and unknown letters are bytes."""
    words = ["▁", *(space + letter for letter in "abc" for space in ("▁", ""))]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    names = {name: number for number, name in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=names, merges=[("▁", letter) for letter in "abc"], byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return _finished(inner, template)


def say(monkeypatch: pytest.MonkeyPatch, said: list[int]) -> None:
    """Let the model say these tokens, whatever it is asked."""

    def forced(draw: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill(0, torch.tensor([said[len(draw.tokens)]]), 9.0)

    monkeypatch.setattr("ctxext.serving.answers.Draw._weighed", forced)


def say_as_qwen(monkeypatch: pytest.MonkeyPatch, said: list[int]) -> None:
    """Let the model say these tokens, in which calls of tools are found as in those of Qwen 3."""
    template = next(value for kinds, value in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in kinds)
    monkeypatch.setattr("ctxext.serving.endpoints.get_response_template", lambda *_: template)
    say(monkeypatch, said)


def _finished(inner: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    made.chat_template = template
    return made


def tiny(tokenizer: Any) -> Any:
    """A random model whose tokens are far from equally likely."""
    config = byte_model().config
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 900, "bos_token_id": 0, "eos_token_id": 1})
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


NO_CROP = "this version of transformers cannot take back a cache of a fixed size"
takes_graphs = pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason=NO_CROP)


def in_eager_graphs() -> dict[str, Any]:
    """Settings of a generation whose steps are graphs, which nothing translates for a processor."""
    how: Any = CompileConfig(backend="aot_eager", mode=None)
    how._compile_all_devices = True
    return {"compile_config": how}


def take_a_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let generations take a step more than there are tokens and undo it, as on Apple's GPUs."""
    deferred: Any = getattr(utils, "DeferredStopCheck", None)
    if deferred is None:
        pytest.skip("this version of transformers takes no such step")
    supported, event = deferred.is_supported, SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda **_: event)
    monkeypatch.setattr(
        deferred, "is_supported", lambda device, *given, **named: supported(torch.device("mps"), *given, **named)
    )


@dataclass
class Asking:
    """A server in this process, and the model behind it."""

    client: TestClient
    model: Any
    tokenizer: Any

    def raw(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status of an answer, and the answer: JSON, or the events of a stream."""
        answer = self.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        if answer.headers["content-type"].startswith("application/json"):
            return answer.status_code, answer.json()
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        return answer.status_code, [line if line == "[DONE]" else json.loads(line) for line in lines]

    def choices(self, path: str = TEXT, **body: Any) -> list[dict[str, Any]]:
        """The answers to a request that is served, joined where they were streamed."""
        status, answer = self.raw(path, body)
        assert status == 200, answer
        if not isinstance(answer, list):
            return list(answer["choices"])
        assert answer[-1] == "[DONE]"
        joined: dict[int, dict[str, Any]] = {}
        for choice in (choice for event in answer[:-1] for choice in event["choices"]):
            whole = joined.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": []})
            whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            whole["logprobs"] += [choice["logprobs"]] if choice["logprobs"] else []
        return [joined[index] for index in sorted(joined)]

    def text(self, path: str = TEXT, **body: Any) -> str:
        (choice,) = self.choices(path, **body)
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    def refused(self, path: str = TEXT, **body: Any) -> str:
        status, answer = self.raw(path, body)
        assert status == 400, (status, answer, body)
        assert answer["error"]["type"] == "invalid_request_error"
        return str(answer["error"]["message"])


@contextmanager
def asking(
    tokenizer: Any, *, together: bool, cached: int = 1024, says: dict[str, Any] | None = None, model: Any = None
) -> Iterator[Asking]:
    """Serve a model, a tiny one unless another is given, in turn or in batches; ``says`` is its generation_config."""
    from starlette.testclient import TestClient

    from ctxext.serving.server import application

    model = tiny(tokenizer) if model is None else model
    vars(model.generation_config).update(says or {})
    served = Served("tiny", Checkpoint("tiny", model, tokenizer), 900, {})
    app: Any = application(served, continuous_batching=together, cached_tokens=cached if together else None)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield Asking(client, tiny(tokenizer), tokenizer)
