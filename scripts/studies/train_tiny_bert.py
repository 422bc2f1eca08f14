"""Train a tiny BERT on texts of 128 tokens, to see what an extended table of positions is worth where none ships.

    python scripts/studies/train_tiny_bert.py books.parquet tiny-bert --steps 600

It makes its own vocabulary, masks 30 percent of the tokens, and takes some ten minutes on one CPU core. The result is a
checkpoint as any other: docs/evidence/masked.md extends it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.texts.corpus import tokenise
from ctxext.texts.documents import Document, read_documents

LENGTH, BATCH, VOCABULARY = 128, 32, 2048
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def main(
    text: Annotated[str, typer.Argument(help="texts, as for ctxext eval")],
    output: Annotated[Path, typer.Argument(help="folder of the checkpoint")],
    steps: Annotated[int, typer.Option(help="of 32 sequences")] = 600,
    documents: Annotated[int, typer.Option(help="how many texts are read")] = 20,
    learning_rate: Annotated[float, typer.Option(help="at its highest")] = 1.5e-3,
) -> None:
    """Train and save a tiny BERT."""
    torch.manual_seed(0)
    books = [book for book, _ in zip(read_documents([text]), range(documents), strict=False)]
    tokenizer = make_tokenizer(books)
    ids = torch.cat([tokenise(book, tokenizer, prefix=[]).input_ids[0] for book in books])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config).train()
    train(model, tokenizer, ids, steps, learning_rate)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def make_tokenizer(books: list[Document]) -> PreTrainedTokenizerFast:
    """A vocabulary of byte pairs, and BERT's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((book.text for book in books[:5]), trainer)
    ends = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=LENGTH, **SPECIAL)


def train(
    model: BertForMaskedLM, tokenizer: PreTrainedTokenizerFast, ids: Tensor, steps: int, learning_rate: float
) -> None:
    """Stretches of text from anywhere, 30 percent of their tokens masked."""
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    masking.generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    front, back = torch.tensor([[tokenizer.cls_token_id]]), torch.tensor([[tokenizer.sep_token_id]])
    special = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    special[:, [0, -1]] = True
    began, recent = time.monotonic(), []
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH, 1))
        stretch = ids[starts + torch.arange(LENGTH - 2)]
        rows = torch.cat([front.expand(BATCH, 1), stretch, back.expand(BATCH, 1)], dim=1)
        inputs, labels = masking.torch_mask_tokens(rows, special_tokens_mask=special)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % 25 == 0 or step == steps:
            mean, recent = sum(recent) / len(recent), []
            typer.echo(f"step {step}/{steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", err=True)


if __name__ == "__main__":
    typer.run(main)
