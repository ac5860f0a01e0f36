#!/usr/bin/env bash
# bash bench.sh [ARGUMENTS]: runs python -m bench; the defaults suit this machine.
# bash bench.sh gpu: tests and measures a GPU, the most telling first; see bench/gpu.py.
# bash bench.sh bits [FOLDER [CHECKPOINT ...]]: divergence, answers and bytes of everything that stores 8, 4 or 2 bits.
# bash bench.sh long CHECKPOINT [FOLDER [LENGTHS [METHODS]]]: calibrates a model, then measures facts and next lines in long
# source code, divergence, bytes and speed: for half a billion parameters a night on two cores. A run that was stopped
# resumes its answers and begins its timings anew. It writes what bench.compare makes of them.
# bash bench.sh blind CHECKPOINT [FOLDER [LENGTHS [METHODS]]]: what a text still answers and how it goes on if it was
# compressed to a share before anyone asked.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1-}" = gpu ] && [ ! -e .venv ] && python3 -c "import torch" 2> /dev/null; then
  exec python3 -m bench.gpu "${@:2}"  # a torch that has been built for this GPU
fi
make --quiet .venv/requirements
[ "${1-}" != gpu ] || exec .venv/bin/python -m bench.gpu "${@:2}"
if [ "${1-}" = bits ]; then
  out=${2:-bits}
  mkdir -p "$out"
  [ $# -gt 2 ] || { make --quiet checkpoints/smollm2 && set -- bits "$out" checkpoints/smollm2; }
  code=$(.venv/bin/python -c "import argparse; print(argparse.__file__)")
  methods=full,full:bits=8,full:bits=4,kvarn:kbits=8,kvarn:vbits=2,kvarn:kbits=2:vbits=2,kivi,kivi:bits=2
  methods+=,rocketkv,rocketkv:bits=8,rocketkv:bits=4,hybrid,hybrid:bits=8,hybrid:bits=4
  methods+=,omnikv,omnikv:bits=8,omnikv:bits=4
  for model in "${@:3}"; do
    name=$(basename "$model")
    ask=(.venv/bin/python eval.py --checkpoint "$model" --dtype float32 --kv "$methods" --budget 512)
    "${ask[@]}" --tasks niah_multikey_1 --length 2000 --samples 10 --chat --stepwise --batch 10 --json "$out/$name-answers.json"
    for length in 1200 8000; do
      "${ask[@]}" --tasks fidelity --text "tasks/haystack.txt,$code" --length $length --forced 32 --samples 2 --batch 4 \
        --json "$out/$name-$length.json"
      .venv/bin/python -m bench --shape "$model/config.json" --kv "$methods" --budget 512 --context $((length - 32)) \
        --no-prefill --no-compile --steps 1 --repeats 1 --json "$out/$name-$length-bytes.json" --results "$out/runs.jsonl"
    done
  done
  exec .venv/bin/python -m bench.compare "$out"/*-*.json --results "$out/bits.json" --plot "$out/bits.png" \
    --command "bash bench.sh bits"
fi
if [ "${1-}" = blind ]; then
  model=${2:?the folder of a checkpoint} out=${3:-blind} lengths=${4:-8000,16000} name=$(basename "$2")
  methods=full,rocketkv,rocketkv:turns=true,snapkv++,expected,keydiff,kvzip,kvzip:heads=equal,kvzip:heads=adaptive,random,h2o,streaming
  methods=${5:-$methods}
  mkdir -p "$out"
  library=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
  cat "$library"/{email,http,json,logging,unittest}/*.py > "$out/code.txt"
  for length in ${lengths//,/ }; do
    ask() { # NAME FLAGS
      .venv/bin/python eval.py --checkpoint "$model" --kv "$methods" --budget .05,.1,.25,.5 --length "$length" \
        --dtype float32 --batch 4 "${@:2}" --json "$out/$name-$length-$1.json"
    }
    ask facts --tasks code_facts --samples 2 --questions 12 --fork --batch 12
    methods=full,rocketkv,snapkv++,expected,keydiff,kvzip,random,h2o,streaming ask asked --tasks code_facts --samples 24
    ask fidelity --tasks fidelity --text "$out/code.txt" --samples 2
    sizes=(--shape "$model/config.json" --context $((length - 128)) --steps 1 --repeats 1 --no-compile)
    .venv/bin/python -m bench "${sizes[@]}" --kv "${methods#full,}" --budget .05,.25,.5 --no-prefill --json "$out/$name-$length-bytes.json"
    .venv/bin/python -m bench "${sizes[@]}" --kv "$methods" --budget .1 --json "$out/$name-$length-prefill.json"
  done
  .venv/bin/python -m bench.compare "$out/$name"-*.json --results "$out/$name.json" --command "bash bench.sh blind"
  exec .venv/bin/python -m bench.compare "$out/$name"-*-{facts,bytes,prefill}.json --plot "$out/$name.png" # of answers
fi
if [ "${1-}" = long ]; then
  model=${2:?the folder of a checkpoint} out=${3:-long} lengths=${4:-8000,16000,30000} name=$(basename "$2")
  methods=full,full:bits=8,full:bits=4,streaming,rocketkv,rocketkv:bits=4,hybrid,snapkv,snapkv++,pyramidkv,quest,sparq
  methods+=,duo,omnikv,infllm:block=32,tailorkv,pqcache,kivi,expected,keydiff,lagkv,simlayer:recent=64,h2o,tova
  methods=${5:-$methods}
  mkdir -p "$out"
  library=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
  cat "$library"/{email,http,json,logging,unittest}/*.py > "$out/code.txt" # code_facts and code_line take single modules
  cat "$library"/{asyncio,multiprocessing,concurrent/futures,xml/dom,ctypes}/*.py > "$out/calibration.txt"
  [ -e "$model/kv_profile.json" ] ||
    .venv/bin/python calibrate.py --checkpoint "$model" --text "$out/calibration.txt" --length 8000
  for length in ${lengths//,/ }; do
    large=$((length > 20000 ? 2048 : 1024))
    ask() { # NAME FLAGS
      .venv/bin/python eval.py --checkpoint "$model" --kv "$methods" --budget "512,$large" --length "$length" \
        --dtype float32 --stepwise --batch 4 "${@:2}" --json "$out/$name-$length-$1.json"
    }
    ask facts --tasks code_facts --samples 24
    ask forked --tasks code_facts --samples 2 --questions 12 --fork
    ask lines --tasks code_line --samples 12
    ask fidelity --tasks fidelity --text "$out/code.txt" --samples 2
    if [ ! -e "$out/$name-$length-speed.json" ]; then # renamed when it is whole: bench writes it after each context
      .venv/bin/python -m bench --shape "$model/config.json" --context $((length - 128)) --no-prefill --kv "$methods" \
        --budget "512,$large" --json "$out/speed.part"
      mv "$out/speed.part" "$out/$name-$length-speed.json"
    fi
  done
  exec .venv/bin/python -m bench.compare "$out/$name"-*.json --results "$out/$name.json" --plot "$out/$name.png" \
    --command "bash bench.sh long"
fi
exec .venv/bin/python -m bench "$@"
