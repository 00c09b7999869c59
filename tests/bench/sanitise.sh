#!/usr/bin/env bash
# The native parts under the sanitisers of gcc: `bash tests/bench/sanitise.sh [address|thread] [pytest options]`.
#
#   address   (the default) AddressSanitizer and UndefinedBehaviorSanitizer over the tests of the recorder and of traces: reads and
#             writes outside of what is allocated or after it was freed, overflow of signed integers, misaligned or null
#             pointers. Leaks are not looked for: the interpreter itself leaves memory behind at its end.
#   thread    ThreadSanitizer over the stress of the ring. The GIL is a mutex that it knows, so what it proves is that
#             every access of the recorder to its state happens with the GIL held, on every path (also those of a
#             thread's end): the day that one does not, two threads meet without an order between them and it says so.
#
# PYTHON names the interpreter (with this project's test extra installed), python3 by default. Nothing is written into
# the repository: the core is built into a temporary folder. Exits with 1 on any finding or failed test.
set -euo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-address}
[ $# -eq 0 ] || shift
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cp -r instrument tests configs pyproject.toml "$folder"
find "$folder" -name '*.so' -delete
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
case $mode in
    address) flags=(-fsanitize=address,undefined -fno-sanitize-recover=undefined) libraries=(libasan.so libubsan.so) ;;
    thread) flags=(-fsanitize=thread) libraries=(libtsan.so) ;;
    *) echo "sanitise.sh: found mode '$mode'; allowed: address, thread" >&2; exit 2 ;;
esac
for source in instrument/native/_*.c; do
    part=$(basename "$source" .c)
    gcc -O1 -g -fno-omit-frame-pointer "${flags[@]}" -Wno-cast-function-type -shared -fPIC -I"$include" \
        "$source" -o "$folder/instrument/native/$part$suffix"
done
preload=
for library in "${libraries[@]}"; do
    preload+="$(realpath "$(gcc -print-file-name="$library")") "
done

cd "$folder"
findings=$folder/findings
export PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1
# Python's own allocator would hide the edges of its blocks. The finding goes to a file, because pytest and the tests'
# child processes keep standard error to themselves.
export PYTHONMALLOC=malloc INSTRUMENT_SANITISED=$mode
export ASAN_OPTIONS=detect_leaks=0:log_path=$findings:exitcode=86:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:log_path=$findings:exitcode=86
export TSAN_OPTIONS=log_path=$findings:exitcode=86:report_signal_unsafe=0
LD_PRELOAD=$preload "$python" -c 'from instrument import native; assert not native.WHY_MISSING, native.WHY_MISSING'
tests=(tests/test_recorder.py tests/test_recorder_faults.py tests/test_mapped.py tests/test_programs.py tests/test_parentage.py
    tests/test_functions.py tests/test_capture.py tests/test_stretch.py)
only=(--deselect "tests/test_functions.py::test_off_by_environment_returns_the_very_function_and_records_nothing"
    -k "not greenlet and not bomb and not never_in_memory")
# That test's process has no environment, and with that no sanitiser. Greenlets copy whole stacks, which AddressSanitizer
# takes for an overrun. What bounds memory is measured without.
if [ "$mode" = thread ]; then
    tests=(tests/test_recorder_faults.py)
    only=(-k "stress and native")
fi
status=0
LD_PRELOAD=$preload "$python" -X faulthandler -m pytest -q -p no:cacheprovider "${tests[@]}" "${only[@]}" "$@" || status=$?
for file in "$findings".*; do
    [ -e "$file" ] || continue
    status=1
    cat "$file" >&2
done
[ "$status" -eq 0 ] && echo "sanitise.sh: $mode: nothing found"
exit "$status"
