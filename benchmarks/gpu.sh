#!/usr/bin/env bash
# Measurements and tests that need a GPU, in three commands of less than nine minutes each; the most important one comes
# first. Each writes an archive of its results, which is rewritten after each step, so that nothing is lost if a step
# fails or the time is up.
#
#   benchmarks/gpu.sh why [FOLDER] [--simulate]       where the time of a session goes; FOLDER/gpu-why.tar.gz
#   benchmarks/gpu.sh decoding [FOLDER] [--simulate]  decoding on the device, and feeding ResNets;
#                                                     FOLDER/gpu-decoding.tar.gz
#   benchmarks/gpu.sh peers [FOLDER] [--simulate]     gpuload next to other loaders; then the tests marked `cuda` and
#                                                     the tests of the fused kernels, both also under sanitizers;
#                                                     FOLDER/gpu-peers.tar.gz
#
#   FOLDER       default: gpu-results
#   --simulate   run everything on the CPU, with small sizes: tests marked `cuda` are collected and skipped, and the
#                figures mean nothing
#   PYTHON       the interpreter; it needs torch, numpy, Pillow, cloudpickle and, for tests, pytest. Steps that need
#                other missing packages are skipped, and the results say so. Default: .venv/bin/python if it exists, else
#                python3.
#   WHEELS       a folder of wheels to install first, for this call only. Default: .whl, if it exists. For wheels that
#                are too large to be uploaded at once, see benchmarks/gpu/pieces.py.
#   PHOTOS       a folder of JPEGs. Default: variations of scikit-image's photographs, or generated images.
#   ROWS         comma-separated: only these rows of the loaders.
#   TESTS        files of tests to run instead of all that have tests marked `cuda`; "none" runs no tests.
#   BUDGET_S     the time limit for everything, in seconds. Default: 500.
#
# Exit status: 0 if all tests passed and no step failed that should have run.
set -uo pipefail
usage="benchmarks/gpu.sh why|decoding|peers [FOLDER] [--simulate]"
part=${1:-} folder=gpu-results simulate=
[[ $part == why || $part == decoding || $part == peers ]] || { echo "usage: $usage" >&2; exit 2; }
for argument in "${@:2}"; do
    case $argument in
        --simulate) simulate=1 ;;
        -*) echo "usage: $usage; got $argument" >&2; exit 2 ;;
        *) folder=$argument ;;
    esac
done
out=$(mkdir -p "$folder" && cd "$folder" && pwd) || exit 2
# Relative paths start at the caller's folder if such a file exists there, else at the repository.
for name in PHOTOS WHEELS TESTS PYTHON; do
    found=
    for path in ${!name:-}; do
        [[ $path == /* || ! -e $path ]] || path=$PWD/$path
        found+=${found:+ }$path
    done
    printf -v "$name" %s "$found"
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d) budget=${BUDGET_S:-500} status=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
photos=(${PHOTOS:+--photos "$PHOTOS"})

archive() {
    local path=$out/gpu-$part.tar.gz
    tar -C "$work" -czf "$path.$BASHPID" . || (($? == 1)) && mv "$path.$BASHPID" "$path" # 1: a file grew meanwhile
}
# Bash handles a signal only once the step has ended, and some signals cannot be handled.
(
    trap 'kill $!; exit' TERM
    while sleep 20 & wait $! && kill -0 $$; do archive; done
) > /dev/null 2>&1 < /dev/null &
keeping=$!
trap 'kill $keeping; wait $keeping; archive; rm -rf "$work" "$work-site"' EXIT
trap 'exit 143' TERM INT

note() {
    echo "$1" | tee -a "$work/steps.txt"
}

has() {
    "$python" -c "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))" "$@" 2> /dev/null
}

# step NAME SECONDS COMMAND…: run a command within its seconds and the remaining budget; its output is in NAME.txt.
# pytest is interrupted 20 s earlier, so that it can report the failures until then.
step() {
    local name=$1 limit=$2 began=$SECONDS left=$((budget - SECONDS)) code ends=TERM grace=0
    shift 2
    [[ " $* " != *" -m pytest "* ]] || ends=INT grace=20
    if ((left < 10)); then
        note "$name: left out: the time was up"
        status=1
        return
    fi
    [[ -z $simulate ]] && ((limit < left)) || limit=$left
    ((limit > 2 * grace)) || grace=0
    timeout -s $ends -k $((grace + 5)) $((limit - grace)) "$@" > "$work/$name.txt" 2>&1 < /dev/null
    code=$?
    case $code in
        0) note "$name: done after $((SECONDS - began)) s" ;;
        124 | 137) note "$name: STOPPED after $((SECONDS - began)) s"; status=1 ;;
        *) note "$name: FAILED after $((SECONDS - began)) s (exit status $code): $(grep . "$work/$name.txt" | tail -1)"; status=1 ;;
    esac
    archive
}

if compgen -G "${WHEELS:-.whl}/*.whl" > /dev/null; then
    site=$work-site
    if timeout 120 "$python" -m pip install --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
        "${WHEELS:-.whl}"/*.whl > "$work/wheels.txt" 2>&1; then
        export PYTHONPATH=$site:$PYTHONPATH
    else
        note "wheels: cannot be installed: $(grep . "$work/wheels.txt" | tail -1)"
        status=1
        exit 1 # other decoders would be measured in their place
    fi
fi
needed=(torch numpy PIL cloudpickle)
has "${needed[@]}" || { note "needed, and not all there for $python: ${needed[*]}"; exit 1; }
timeout 20 nvidia-smi > "$work/nvidia-smi.txt" 2>&1 || note "nvidia-smi: $(tail -1 "$work/nvidia-smi.txt")"
step machine 60 "$python" -m benchmarks.machine
cat "$work/machine.txt"

# loaders SECONDS: run the command's rows and write their figures to gpu-COMMAND.json.
loaders() {
    local limit=$1 left=$((budget - SECONDS)) options=("${photos[@]}")
    [[ -z $simulate ]] && ((limit < left)) || limit=$left
    [[ ! $simulate ]] || options=(--simulate)
    step loaders "$limit" "$python" -m benchmarks.gpu "$part" "${options[@]}" ${ROWS:+--only "$ROWS"} \
        --budget-s $((limit - 10)) --json "$work/gpu-$part.json"
    cat "$work/loaders.txt" 2> /dev/null
}

tests() {
    # Use only those options of pyproject.toml that every pytest knows. A newer library's warning is shown, and is not an
    # error; gpuload's warnings are RuntimeWarnings.
    local pytest=("$python" -m pytest -q -c pyproject.toml -o addopts=--import-mode=importlib -p no:cacheprovider -rfEs
        -W default -W error::RuntimeWarning -W "ignore:nvImageCodec is installed:RuntimeWarning")
    [[ ${TESTS:-} != none ]] || return
    has pytest || { note "tests: left out: pytest is not installed"; status=1; return; }
    local cores
    cores=$(nproc)
    has xdist && pytest+=(-n $((cores < 8 ? cores : 8)) --dist worksteal)
    # If a worker runs a test, a hung call of the driver ends only the worker, which is replaced.
    local method=signal
    has xdist && method=thread
    has pytest_timeout && pytest+=(--timeout 60 --timeout-method "$method")
    # Collect only files that have such tests: collecting all others takes longer than the tests.
    local files with_transfer marked="cuda or interpreter" require=1 sanitizer=(TORCH_CUDA_SANITIZER=1)
    mapfile -t files < <(grep -rlE 'mark\.cuda' ${TESTS:-tests} --include='test_*.py' | sort)
    mapfile -t with_transfer < <(printf '%s\n' "${files[@]}" | grep -E 'tests/cuda/|test_(transfer|cuda)\.py$')
    if [[ $simulate ]]; then
        marked=cuda require=0 sanitizer=()
    else
        [[ ${TESTS:-} ]] || files+=(tests/stage/fused)
        export TRITON_INTERPRET=0
    fi
    # One process compiles the kernels, and the others find them in Triton's cache.
    local alone=("${pytest[@]}")
    has xdist && alone+=(-n 0)
    [[ ${TESTS:-} ]] || step kernels 60 env GPULOAD_REQUIRE_CUDA=$require OMP_NUM_THREADS=1 "${alone[@]}" -m cuda \
        tests/cuda/test_kernels.py
    step tests 150 env GPULOAD_REQUIRE_CUDA=$require OMP_NUM_THREADS=1 "${pytest[@]}" --durations 15 \
        --junitxml "$work/tests.xml" -m "$marked" "${files[@]}"
    tail -n 40 "$work/tests.txt"

    # Run every fused kernel on batches of 8, in all cases except those that record a graph, which needs the caching
    # allocator. Without that allocator, each allocation is made by the driver, so memcheck knows its bounds.
    local cases=Random,Color,Gaussian,Normalize,Resize,Crop,Pad,Gray,Auto,Trivial,classic,evaluation,timm,SimCLR
    local fused=("$python" -m benchmarks.augmentation --device cuda --backends fused --peers none --only "$cases"
        --rounds 1 --batch-size 8 --budget-s 30 "${photos[@]}")
    [[ $simulate || ${PHOTOS:-} ]] || ! command -v compute-sanitizer > /dev/null \
        || step photographs 30 "$python" -c \
            "from benchmarks.augmentation.photographs import default_folder; print(default_folder())"
    local ran="import json, sys
cases = json.load(open(sys.argv[1]))['devices']['cuda']['cases']
rows = [row for case in cases for row in case['rows'].values() if row['missing'] in (None, 'the time was up')]
print(sum(bool(row['readings']) for row in rows), 'of', len(rows), 'ran')"
    for tool in memcheck racecheck; do
        if [[ $simulate ]]; then
            note "$tool: left out: it needs a GPU"
        elif ! command -v compute-sanitizer > /dev/null; then
            note "$tool: left out: compute-sanitizer is not installed"
        else
            step "$tool" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
                compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 86 "${fused[@]}" \
                --json "$work/$tool.json"
            tail -n 5 "$work/$tool.txt"
            note "$tool: $("$python" -c "$ran" "$work/$tool.json" 2>&1 | tail -1)"
        fi
    done

    # racecheck comes last, since it misses most races: it found one of three planted ones.
    has pytest_timeout && pytest+=(--timeout 30)
    # It does not know tensors without storage, and reports accesses that a graph recorded as unsynchronized.
    ((${#with_transfer[@]})) && step tests-cuda-sanitizer 100 env "${sanitizer[@]}" GPULOAD_REQUIRE_CUDA=$require \
        OMP_NUM_THREADS=1 "${pytest[@]}" -m "cuda and not slow" -k "not any_layout and not cuda_graph" "${with_transfer[@]}"
    tail -n 15 "$work/tests-cuda-sanitizer.txt" 2> /dev/null
}

{ # read as a whole, should this file change meanwhile
    if [[ $part == peers ]]; then
        loaders 220
        tests
    else
        loaders "$budget"
    fi
    echo
    cat "$work/steps.txt"
    echo "all of it is in $out/gpu-$part.tar.gz, after $SECONDS s"
    exit $status
}
