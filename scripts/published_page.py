"""The table of docs/guides/published-configs.md, from tests/famous.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENTRIES = Path(__file__).resolve().parents[1] / "tests" / "famous.json"
BESIDE = ("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_local_base_freq")
LENGTHS = (
    *("max_position_embeddings", "original_max_position_embeddings", "model_max_length", "max_sequence_length"),
    *("n_positions", "max_seq_len", "seq_length"),
)
METHODS = {
    "plain": "none",
    "dual chunk": "none; dual chunk attention in vLLM and SGLang",
    "own code": "in its own code",
    "outdated": "`longrope` under an older name",
    "learned": "none: a learned table",
    "alibi": "none: ALiBi",
    "buckets": "none: buckets of distances",
    "none": "none: no positions",
    "tables in its code": "none: a table in its code",
    "proportional": "none; the slower pairs stand still",
    "dynamic with alpha": "another base, from `alpha`",
}


def published_rows() -> list[list[str]]:
    """Return every published config: its form, its lengths, how it is scaled, where it was read."""
    entries = json.loads(ENTRIES.read_text(encoding="utf-8"))
    lines = [["model", "published form", "trained", "window", "scaling", "lengths by", "source"]]
    for name, entry in sorted(entries.items(), key=lambda item: item[0].lower()):
        window = f"{entry['window']:,}" + (" (asked)" if entry["asked"] else "")
        method = METHODS.get(entry["method"], f"`{entry['method']}`")
        cells = [name, _form(entry["config"]), f"{entry['trained']:,}", window, method, entry["documented"]]
        lines.append([*cells, _source(entry["source"])])
    return lines


def _form(config: dict[str, Any]) -> str:
    """The fields that say where positions are, on one line, with long lists cut."""
    text = next((config[part] for part in ("text_config", "llm_config") if isinstance(config.get(part), dict)), config)
    rope = {field: text[field] for field in ("rope_scaling", "rope_parameters") if text.get(field)}
    chunked = {field: config[field] for field in ("dual_chunk_attention_config",) if field in config}
    fields = {field: text[field] for field in (*LENGTHS, *BESIDE) if text.get(field) is not None} | rope | chunked
    if not fields:
        return "no length, no base"
    return "<br>".join(f"`{field}: {json.dumps(_cut(value))}`" for field, value in fields.items())


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {field: _cut(inner) for field, inner in value.items()}
    return f"{len(value)} numbers" if isinstance(value, list) and len(value) > 4 else value


def _source(source: str | None) -> str:
    if source is None:
        return "from memory"
    address, _, rest = source.partition(", ")
    address, _, more = address.partition(";")
    rest = "; ".join(part.strip() for part in (more, rest) if part.strip())
    if not address.startswith("https://"):
        return source
    place = address.removeprefix("https://")
    label = "the hub" if place.startswith("huggingface.co/") else "/".join(place.split("/")[1:3])
    return f"[{label}]({address})" + (f"; {rest}" if rest else "")
