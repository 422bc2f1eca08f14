#!/usr/bin/env bash
# Run tests in an environment of their own: "floor" the base on the oldest release of each dependency, then the suite on
# the oldest torch, transformers and typer; "newest" the suite on the newest of everything. The rest is pytest's.
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
    wanted=('.[train,eval,pdf,demo,deepspeed,embed]' beartype ipykernel jupytext mypy nbclient pytest pytest-xdist ruff triton)
    for name in answers gate prefixes real_servers requests server; do # serve needs a newer one
        set -- --ignore "tests/serving/test_$name.py" "$@"
    done
    # The base alone. Its jaxtyping does not take the option of pytest that newer ones have.
    grep -E '^(pytest|beartype)==' .ci/constraints.txt >"$constraints"
    sed -n '/^dependencies/,/^]/s/.*"\(.*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml >>"$constraints"
    "$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable . pytest beartype
    "$venv/bin/python" -m pytest -o addopts="-q --strict-markers" -m "not slow and not nightly" \
        tests/methods tests/kernels tests/models tests/planning tests/core/test_patching.py tests/core/test_saved.py
    # Whatever transformers itself pins follows its own version.
    grep -vE '^(torch|triton|transformers|tokenizers|huggingface_hub|safetensors|typer)==' .ci/constraints.txt >"$constraints"
    oldest torch >>"$constraints"
    oldest typer >>"$constraints"
    ;;
newest)
    transformers=transformers wanted=('.[dev]')
    : >"$constraints"
    ;;
*) echo "Say floor or newest, found $kind." >&2 && exit 2 ;;
esac
"$venv/bin/python" -m pip install --quiet --constraint "$constraints" torch "$transformers"
"$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable "${wanted[@]}"
"$venv/bin/python" -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
"$venv/bin/python" -m pytest -n 2 --dist loadscope -o addopts="-q --strict-markers" -m "not nightly" "$@"
