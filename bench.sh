#!/usr/bin/env bash
# bash bench.sh [ARGUMENTS]: runs python -m bench; the defaults suit this machine.
# bash bench.sh paper: the settings of the methods' papers, beside their figures.
# bash bench.sh gpu: what to learn on a GPU first, in about 25 minutes; see bench/gpu.py.
# bash bench.sh compare [FOLDER]: answers, bytes and speed of every method on the needle checkpoint. A run that was
# stopped resumes its answers.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1-}" = gpu ] && [ ! -e .venv ] && python3 -c "import torch" 2> /dev/null; then
  exec python3 -m bench.gpu "${@:2}"  # a torch that has been built for this GPU
fi
make --quiet .venv/requirements
[ "${1-}" != gpu ] || exec .venv/bin/python -m bench.gpu "${@:2}"
if [ "${1-}" = compare ]; then
  out=${2:-comparison}
  mkdir -p "$out"
  methods=full,exact_topk,streaming,rocketkv,rocketkv:bits=4,hybrid,snapkv:gqa=false,snapkv,snapkv++,pyramidkv,quest
  methods+=,quest:skip_layers=0,sparq,duo,simlayer:recent=64,h2o,roco,cam,d2o,d2o:merge=paper:ratio=3+1,omnikv,omnikv:offload=true,infllm:block=32
  methods+=,tailorkv:bits=1,tailorkv,pqcache,kivi,full:bits=4,brute_offload
  .venv/bin/python eval.py --checkpoint needle --tasks niah_multikey_1,niah_multikey_2,two_stage_lookup,perplexity \
    --length 4096 --samples 10 --questions 3 --stepwise --batch 5 --kv "$methods" --budget 128,512 --json "$out/answers.json"
  .venv/bin/python -m bench --shape needle/config.json --context 3968 --kv "$methods" --budget 128,512 --no-prefill \
    --json "$out/speed.json"
  exec .venv/bin/python -m bench.compare "$out/answers.json" "$out/speed.json" --plot "$out/comparison.png"
fi
[ "${1-}" != paper ] || set -- --paper "${@:2}"
exec .venv/bin/python -m bench "$@"
