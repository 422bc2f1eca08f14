#!/usr/bin/env bash
# Run the test suite in an environment of its own: "floor" on the oldest transformers and typer of pyproject.toml,
# "newest" on the newest release of everything, torch included. What follows is handed on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1
shift
venv=.venv-$kind
"${PYTHON:-python3.11}" -m venv --clear "$venv"
constraints=$venv/constraints.txt
case $kind in
floor)
    oldest() { sed -n "s/.*\"\($1\)>=\([0-9.]*\)\".*/\1~=\2.0/p" pyproject.toml; }
    transformers=$(oldest transformers)
    # Whatever transformers itself pins follows its own version.
    grep -vE '^(transformers|tokenizers|huggingface_hub|safetensors|typer)==' .ci/constraints.txt >"$constraints"
    oldest typer >>"$constraints"
    ;;
newest)
    transformers=transformers
    : >"$constraints"
    ;;
*)
    echo "Say floor or newest, found $kind." >&2
    exit 2
    ;;
esac
"$venv/bin/python" -m pip install --quiet --constraint "$constraints" torch "$transformers"
"$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable '.[dev]'
"$venv/bin/python" -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
"$venv/bin/python" -m pytest -n 2 -m "not nightly" "$@"
