#!/bin/sh
# On the machine with the card: driver, python and `pip install mlsdc`; torch beside it for the comparisons with the reference interpreter,
# cuBLAS and SDPA. Every artifact is a process of its own, so that one that fails leaves the others alone.      usage: run.sh [FOLDER]
set -u
in=${1:-gpu-check}
wrong=0
mlsdc bench gpu-check "$in/smollm2.mlsdc" --reference "$in/smollm2-cpu.mlsdc" --json "$in/smollm2.json" || wrong=1
mlsdc bench gpu-check "$in/smollm2-drafts.mlsdc" --reference "$in/smollm2-cpu.mlsdc" --json "$in/smollm2-drafts.json" || wrong=1
if [ -d "$in/smollm2-tma.mlsdc" ]; then
  mlsdc bench gpu-check "$in/smollm2-tma.mlsdc" --reference "$in/smollm2-cpu.mlsdc" --json "$in/smollm2-tma.json" || wrong=1
fi
for name in needle-fp8 needle-int8 needle-int4 llama-3-8b-bf16 llama-3-8b-fp8 llama-3-8b-int4; do
  mlsdc bench gpu-check "$in/$name.mlsdc" --json "$in/$name.json" || wrong=1
done
# which build of each kernel is fastest on this card, beside the artifact; and the same check with those
for name in smollm2 llama-3-8b-bf16; do
  mlsdc tune "$in/$name.mlsdc" --kernels-only || wrong=1
done
mlsdc bench gpu-check "$in/smollm2.mlsdc" --reference "$in/smollm2-cpu.mlsdc" --json "$in/smollm2-tuned.json" || wrong=1
exit $wrong
