#!/usr/bin/env bash
# Run the test suite on the oldest transformers that pyproject.toml allows, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
floor=$(sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
venv=.venv-floor
"${PYTHON:-python3.11}" -m venv "$venv"
# Whatever transformers itself pins follows its own version.
grep -vE '^(transformers|tokenizers|huggingface_hub|safetensors)==' .ci/constraints.txt >"$venv/constraints.txt"
"$venv/bin/python" -m pip install --quiet --constraint "$venv/constraints.txt" torch "transformers~=$floor.0"
"$venv/bin/python" -m pip install --quiet --constraint "$venv/constraints.txt" --editable '.[dev]'
"$venv/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
"$venv/bin/python" -m pytest -n 2 -m "not slow" "$@"
