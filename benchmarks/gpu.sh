#!/usr/bin/env bash
# What needs a GPU: trains on every visible one in bfloat16, resumes, and measures acceptance. Run it after `make install`.
# Prints throughput and the share of time spent waiting for data from metrics.jsonl; it decides no test.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/${VENV:-.venv}/bin:$PATH"
out=${1:-demo/gpu}
steps=${2:-100}
rm -rf "$out"
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
echo '{"num_hidden_layers": 2}' > "$out/draft.json"
dflash-prep tokenize data/demo.jsonl.zst -o "$out/tokens"
dflash-train --calibrate "$out/cost.json" --draft-config "$out/draft.json"
dflash-prep plan-epochs --data "$out/tokens" --token-budget 8192 --epochs 12 --cost "$out/cost.json" --compare
for strategy in bucketed packed; do
  dflash-prep plan-epochs --data "$out/tokens" -o "$out/plan-$strategy" --strategy "$strategy" --token-budget 8192 --epochs 12 \
    --cost "$out/cost.json"
  train=(dflash-train --manifest-dir "$out/plan-$strategy" --draft-config "$out/draft.json" -o "$out/run-$strategy")
  "${train[@]}" --max-steps $((steps / 2))
  "${train[@]}" --max-steps "$steps" --resume auto
  dflash-eval --draft "$out/run-$strategy" --limit 10 --max-new-tokens 64 --json "$out/$strategy.json"
  python - "$out/run-$strategy/metrics.jsonl" "$strategy" << 'PYTHON'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1])][4:]  # the first steps warm up
seconds = sum(row["seconds"] for row in rows)
tokens = sum(row["tokens"] for row in rows)
waited = sum(row["seconds"] * row["data_wait_share"] for row in rows)
print(f"{sys.argv[2]}: {tokens / seconds / 1000:.1f} Ktok/s real, {waited / seconds:.2%} waiting for data, loss {rows[-1]['loss']:.3f}")
PYTHON
done
