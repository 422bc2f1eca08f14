#!/usr/bin/env bash
# Run the tests marked gpu and fail if none ran: on a machine without CUDA they would all be skipped. Names are printed
# as tests end, since the time on a rented machine may end first. Other files may import what that machine lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device on this machine"'
PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -p no:cacheprovider -o addopts="-v --strict-markers" -m gpu \
	$(grep -rl --include="test_*.py" "mark\.gpu" tests | sort) "$@"
