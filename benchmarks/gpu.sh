#!/usr/bin/env bash
# All that waits for a GPU, in one call of less than 9 minutes: the tests marked `cuda`, those of the fused kernels, the
# benchmark of augmenting, and, where ncu is installed, a profile of the fused kernel.
#
#   benchmarks/gpu.sh [FOLDER]     what it finds goes to FOLDER (default: gpu-results)
#
#   PYTHON   the interpreter; it needs torch with CUDA, torchvision, pytest, hypothesis and rich. What else is missing is
#            left out, and the tables say so. Default: .venv/bin/python where there is one, else python3.
#   PHOTOS   a folder of JPEGs. Default: scikit-image's photographs, varied.
#
# Exit status: 0 if all tests passed and nothing failed that should have run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
photos=(${PHOTOS:+--photos "$PHOTOS"})
status=0

nvidia-smi > "$out/device.txt" 2>&1 || echo "nvidia-smi: $(tail -1 "$out/device.txt")"

# Only files that have such tests: others may need packages that a machine with a GPU has not. No plugin is asked for.
mapfile -t files < <(grep -rlE 'mark\.cuda' tests --include='test_*.py' | sort)
GPULOAD_REQUIRE_CUDA=1 timeout -k 5 160 "$python" -m pytest -q -m cuda -o addopts=--import-mode=importlib \
    "${files[@]}" 2>&1 | tee "$out/tests.txt" || status=1

# The kernels' own tests run on a GPU where there is one, else in Triton's interpreter, so they are not marked. Most of
# their time is the compiler's, on one core: so all files at once.
running=()
for file in tests/stage/fused/test_*.py; do
    timeout -k 5 100 "$python" -m pytest -q -o addopts=--import-mode=importlib "$file" \
        > "$out/tests-$(basename "$file" .py).txt" 2>&1 &
    running+=($!)
done
for process in "${running[@]}"; do
    wait "$process" || status=1
done
tail -qn 1 "$out"/tests-test_*.txt | tee "$out/tests-fused.txt"

timeout -k 5 210 "$python" -m benchmarks.augmentation --device cuda "${photos[@]}" --budget-s 185 \
    --json "$out/augmentation-cuda.json" 2>&1 | tee "$out/augmentation-cuda.txt" || status=1

# The clocks are left as they are: they belong to the machine.
if command -v ncu > /dev/null; then
    timeout -k 5 70 ncu --clock-control none --set full --kernel-name regex:one_pass --launch-skip 6 --launch-count 4 \
        "$python" -m benchmarks.augmentation.kernel "${photos[@]}" --launches 8 > "$out/ncu.txt" 2>&1 ||
        { echo "ncu failed: $(tail -1 "$out/ncu.txt")"; status=1; }
else
    echo "ncu is not installed: no profile"
fi
echo "all of it is in $out"
exit $status
