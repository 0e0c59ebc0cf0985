#!/usr/bin/env bash
# What needs a GPU, in ten minutes on one: layouts, a step's parts, `--compile`, utilisation, all in bfloat16 with a target of
# 1.5 billion random weights; then a real draft of the default target, resumed and measured. It trains on every visible GPU
# and decides no test. Run it after `make install`: benchmarks/gpu.sh [OUTPUT] [STEPS]. TINY=1 tries it out on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/${VENV:-.venv}/bin:$PATH"
out=${1:-demo/gpu}
steps=${2:-40}
corpus=${CORPUS:-data/demo.jsonl.zst}
tiny=${TINY:+--tiny}
limit=(); [ -z "$tiny" ] || limit=(--limit 20)
dtype=bfloat16
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
rm -rf "$out"
mkdir -p "$out"
gpus=$(nvidia-smi --query-gpu=name,memory.total --format=csv,noheader || true)
echo "${gpus:-no GPU}"
target=$out/target
python benchmarks/random_target.py "$target" $tiny
echo '{"num_hidden_layers": 2}' > "$out/draft.json"

# Both strategies, with and without --compile, as users train; utilisation and the share of time that GPUs are busy.
dflash-prep tokenize "$corpus" --tokenizer "$target" -o "$out/random" --max-length 1024 --max-reject-share 1 "${limit[@]}"
for strategy in bucketed packed; do
  plan=$out/random-$strategy
  dflash-prep plan-epochs --data "$out/random" -o "$plan" --strategy "$strategy" --token-budget 8192 --epochs 24
  for compile in "" --compile; do
    run=$plan-run$compile
    if [ -n "$gpus" ]; then
      nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 200 > "$run.busy" &
      watch=$!
    fi
    dflash-train --manifest-dir "$plan" --target "$target" --draft-config "$out/draft.json" --dtype "$dtype" \
      --max-steps "$steps" --save-every 100000 -o "$run" $compile
    [ -z "$gpus" ] || kill "$watch"
    python benchmarks/run_speed.py "$run" "$plan" "$target" ${gpus:+"$run.busy"}
  done
done

# Layouts against each other, a step's parts, and what composition does to the default target's draft.
sizes=(--samples 100000 --token-budget 8192 --slots 4)
learning=(--samples 4000 --epochs 6)
[ -z "$tiny" ] || { sizes=(--samples 10 --token-budget 1024 --slots 1); learning=(--samples 30 --epochs 1 --seeds 1); }
CUDA_VISIBLE_DEVICES=0 python benchmarks/train.py strategies split --target "$target" --corpus "$corpus" --dtype "$dtype" \
  "${sizes[@]}"
CUDA_VISIBLE_DEVICES=0 python benchmarks/train.py composition --corpus "$corpus" --dtype "$dtype" "${learning[@]}"
[ -z "$tiny" ] || exit 0

# A real draft: trained, resumed, measured.
dflash-prep tokenize "$corpus" -o "$out/tokens"
dflash-train --calibrate "$out/cost.json" --draft-config "$out/draft.json"
dflash-prep plan-epochs --data "$out/tokens" --token-budget 8192 --epochs 12 --cost "$out/cost.json" --compare
dflash-prep plan-epochs --data "$out/tokens" -o "$out/plan" --strategy packed --token-budget 8192 --epochs 12 --cost "$out/cost.json"
train=(dflash-train --manifest-dir "$out/plan" --draft-config "$out/draft.json" -o "$out/run")
"${train[@]}" --max-steps "$steps"
"${train[@]}" --max-steps $((2 * steps)) --resume auto
dflash-eval --draft "$out/run" --limit 10 --max-new-tokens 64 --json "$out/run.json"
