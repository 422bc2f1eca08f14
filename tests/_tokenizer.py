"""A tokenizer of bytes, made here: what a test writes is what a model reads."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def make_tokenizer(*, bos: bool) -> PreTrainedTokenizerFast:
    """One token per byte, ids 0..255, and a BOS (id 256) that it puts in front itself if ``bos``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(alphabet)}, "<s>": 256}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


BYTES, BYTES_AFTER_BOS = make_tokenizer(bos=False), make_tokenizer(bos=True)  # read them only


def make_two_sided_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with a token in front, one behind, and one for what is masked."""
    made = make_tokenizer(bos=True)
    made.add_special_tokens({"mask_token": "<mask>", "sep_token": "</s>", "pad_token": "<pad>"})
    ends = [("<s>", 256), ("</s>", made.sep_token_id)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


def make_letters() -> PreTrainedTokenizerFast:
    """One letter per token, also of those that a random model gives: 256 letters, a BOS, and a chat template."""
    # By "abcdef", transformers finds out how a tokenizer joins its tokens, where an answer stops at a word.
    letters = {letter: i for i, letter in enumerate("abcdef" + "".join(map(chr, range(0x4E00, 0x4EFA))))}
    inner = Tokenizer(models.WordLevel(vocab=letters | {"<s>": 256}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<s>")
    made.chat_template = (
        "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
        "{{ raise_exception('Unknown role ' + message.role) }}{% endif %}{{ message.content }}{% endfor %}"
    )
    return made
