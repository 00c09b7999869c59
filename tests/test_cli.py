"""The command, as a user types it: exit codes, signals, children, and no traceback for what is wrong outside."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import read_until, receiver

import instrument
from instrument import chrome
from instrument.cli import help_verb, main
from instrument.profile.model import VIEWS
from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.trace.trace import Trace

INSTRUMENT = [sys.executable, "-m", "instrument"]
OURS = ("INSTRUMENT_PROFILE", "INSTRUMENT", "INSTRUMENT_RUN_PID", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of the environment that would say what to do."""

WORK = "def step(x):\n    return x + 1\n"
PROFILE = """
    service: shop
    functions:
      - match: "work:step"
    export:
      chrome: {path: "traces/{service}-{pid}-{window}.json"}
      summary: {to: stderr}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a service of two modules and a profile, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "work.py", WORK)
    write(tmp_path / "profile.yaml", PROFILE)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INSTRUMENT, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False, **options
    )


def traces() -> list[Path]:
    return sorted(Path("traces").glob("*")) if Path("traces").exists() else []


def test_the_version_is_reported() -> None:
    assert run("--version").stdout == f"instrument {instrument.__version__}\n"


MAIN = """
import sys
from work import step
print(step(1), sys.argv[1:], __name__, sys.path[0] or "cwd")
"""


def test_run_is_the_host_with_a_summary_and_a_trace_next_to_it(folder: Path) -> None:
    write(folder / "main.py", MAIN)
    plain = subprocess.run([sys.executable, "main.py", "a", "--b"], capture_output=True, text=True, check=True)
    done = run("run", "--profile", "profile.yaml", "--", "main.py", "a", "--b")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert "step" in done.stderr
    (path,) = traces()
    trace, _ = chrome.load(path)
    assert [span.site.name for span in trace.spans] == ["step"]
    assert f"\nProcess: {trace.origin.pid}\nChrome trace: {path}\n" in done.stderr


SHOW = "import sys, work; work.step(1); print(sys.argv, sys.path[0], sys.flags, sys.warnoptions, __name__)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "host", "stdin"),
    [
        ([], ["-c", SHOW, "-I"], None),
        ([], ["-", "-I"], SHOW),
        ([], ["-O", "-Xutf8", "main.py", "-I"], None),
        pytest.param(["-O", "-X", "utf8", "-W", "error", "-B"], ["main.py"], None, marks=pytest.mark.slow),
        *([pytest.param(["-P"], ["-m", "main"], None, marks=pytest.mark.slow)] if sys.version_info >= (3, 11) else []),
    ],
)
def test_the_host_gets_its_own_arguments_and_the_flags_of_our_interpreter(
    folder: Path, flags: list[str], host: list[str], stdin: str | None
) -> None:
    write(folder / "main.py", SHOW)
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *flags]
    options: Any = {"input": stdin, "capture_output": True, "text": True, "env": environ, "check": False}
    plain = subprocess.run([*command, *host], **options)
    done = subprocess.run([*command, "-m", "instrument", "run", "--profile", "profile.yaml", "--", *host], **options)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert len(traces()) == 1


def test_a_source_tree_in_the_current_folder_gives_way_to_the_installed_package(folder: Path) -> None:
    """After `pip install .` the tree has no recorder in C."""
    package = Path(instrument.__file__).parent
    shutil.copytree(package, folder / "instrument", ignore=shutil.ignore_patterns("*.so", "__pycache__", "docs"))
    write(folder / "main.py", "import work, instrument\nwork.step(1)\nprint(instrument.__file__)")
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert (done.returncode, "nothing is recorded" in done.stderr) == (0, False)
    assert len(traces()) == 1


def test_files_go_below_the_folder_in_which_the_host_was_started(folder: Path) -> None:
    write(folder / "main.py", "import os, work\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nwork.step(1)")
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    (path,) = traces()
    assert f"Chrome trace: {folder / path}" in done.stderr
    assert not list((folder / "elsewhere").iterdir())


def test_an_interrupted_host_ends_by_the_signal_with_a_summary_of_several_views(folder: Path) -> None:
    profile = 'functions: [{match: "work:*"}]\nexport: {summary: {to: stderr, views: [overview, operators]}}'
    write(folder / "views.yaml", profile)
    write(
        folder / "main.py", "from work import step\nstep(1)\nimport os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = run("run", "--profile", "views.yaml", "--", "main.py")
    assert (done.returncode, "Overview Report" in done.stderr) == (-2, True)


def test_a_parent_that_does_not_read_our_summary_does_not_make_the_host_hang(folder: Path) -> None:
    calls = "; ".join(f"work.step{i}(1)" for i in range(60))
    write(folder / "work.py", "\n".join(f"def step{i}(x): return x" for i in range(60)))
    write(folder / "all.yaml", 'functions: [{match: "work:*"}]\nexport: {summary: {to: stderr, rows: 100}}')
    write(folder / "main.py", f"import work, instrument.sessions.session as p\np.EXIT_LIMIT_NS = 10**9\n{calls}")
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    host = subprocess.Popen([*INSTRUMENT, "run", "--profile", "all.yaml", "--", "main.py"], stderr=writer)
    os.close(writer)
    try:
        assert host.wait(timeout=240) == 0
        assert b"Summary of " in os.read(reader, 4096)
    finally:
        host.kill()
        host.wait()
        os.close(reader)


@pytest.mark.slow
def test_a_sigterm_during_our_own_work_on_the_main_thread_waits_for_its_end(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import os, signal, sys, time
        from types import SimpleNamespace
        from instrument import chrome
        from instrument.sessions import process
        from work import step

        real = chrome.dump

        def slow(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            return real(*arguments)

        step(1)
        if "locked" in sys.argv:
            with process.session().exporting.lock.acquire_within():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
            time.sleep(600)
        if "missed" in sys.argv:  # as where the main thread is just about to sleep
            sent = []

            def kill(*arguments):
                sent.append(arguments)
                if len(sent) > 1:
                    os.kill(*arguments)

            process.os = SimpleNamespace(kill=kill, getpid=os.getpid)
        if "reading" in sys.argv:
            verdicts = process.session().selection.verdicts

            def interrupted(**options):
                with process.session().selection._lock:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.1)
                return verdicts(**options)

            process.session().selection.verdicts = interrupted
            process.session().summary()
            time.sleep(600)
        chrome.dump = slow
        """,
    )
    for arguments in ([], ["locked"], ["reading"], ["reading", "missed"]):
        done = run("run", "--profile", "profile.yaml", "--", "main.py", *arguments)
        assert (done.returncode, "Summary of " in done.stderr) == (-signal.SIGTERM, True), done.stderr
    assert len(traces()) == 4


@pytest.mark.slow
def test_an_exit_waits_for_a_stop_that_a_daemon_thread_has_begun(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import threading, time
        import instrument
        from instrument import chrome
        from work import step

        real = chrome.dump
        begun = threading.Event()

        def slow(*arguments):
            begun.set()
            time.sleep(0.5)
            return real(*arguments)

        chrome.dump = slow
        step(1)
        threading.Thread(target=instrument.stop, daemon=True).start()
        begun.wait()
        """,
    )
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert (done.returncode, "Summary of " in done.stderr) == (0, True)
    assert len(traces()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed", ["0 1", *(pytest.param(one, marks=pytest.mark.slow) for one in ("0", "1", "2", "1 2"))]
)
def test_a_daemon_with_closed_standard_streams_runs_and_has_an_agent(folder: Path, closed: str) -> None:
    write(folder / "main.py", "from work import step\nstep(1)\nopen('done', 'w').close()\nprint(1)")
    closing = " ".join(f"{number}>&-" for number in closed.split())
    plain = subprocess.run(f"{sys.executable} main.py {closing}", shell=True, check=False)
    command = " ".join([*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py", closing])
    (folder / "done").unlink()
    ours = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert (ours.returncode, (folder / "done").exists()) == (plain.returncode, True)
    assert len(traces()) == 1
    assert ("2" not in closed) == ("Summary of " in ours.stderr)
    assert "Not observed: agent" not in ours.stderr


@pytest.mark.slow
def test_names_beyond_ascii_are_written_and_printed_by_an_ascii_locale(folder: Path) -> None:
    profile = "service: größe-🙂\nfunctions: [{match: '__main__:größe'}]\n"
    profile += "export: {chrome: {path: 'traces/{service}.json'}, summary: {to: stderr}}\n"
    (folder / "profile.yaml").write_text(profile, "utf-8")
    (folder / "main.py").write_text("def größe(n): return n\ngröße(1)\n", "utf-8")
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("run", "--profile", "profile.yaml", "--", "main.py", env=environ)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    (path,) = traces()
    assert path.name == "größe-_.json"
    for words in (["report", path, "--view", "events"], ["check", "profile.yaml"]):
        for encoding in (environ, {**os.environ, "PYTHONIOENCODING": "ascii"}):
            done = run(*words, env=encoding)
            assert (done.returncode, done.stderr) == (0, "")
            assert "gr\\xf6\\xdfe" in done.stdout


def test_stop_gives_the_signal_back(folder: Path) -> None:
    write(folder / "main.py", "import instrument, signal; instrument.stop(); print(signal.getsignal(signal.SIGTERM))")
    assert run("run", "--profile", "profile.yaml", "--", "main.py").stdout.strip() in ("0", "Handlers.SIG_DFL")


def test_an_import_that_fails_shows_the_traceback_of_the_plain_host(folder: Path) -> None:
    write(folder / "work.py", "1 / 0")
    write(folder / "main.py", "import work")
    plain = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, check=False)
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert plain.stderr in done.stderr


def test_run_with_a_module_and_with_the_profile_from_the_environment(folder: Path) -> None:
    write(folder / "main.py", MAIN)
    plain = subprocess.run([sys.executable, "-m", "main", "x"], capture_output=True, text=True, check=True)
    done = run("run", "-m", "main", "x", env={**os.environ, "INSTRUMENT_PROFILE": "profile.yaml"})
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert len(traces()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "code", "stderr"),
    [
        ("raise SystemExit(7)", 7, ""),
        pytest.param("import sys; sys.exit('text')", 1, "text", marks=pytest.mark.slow),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        pytest.param(
            "import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, "Summary of ", marks=pytest.mark.slow
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
)
def test_exit_codes_and_signals_of_the_host_pass_through(folder: Path, source: str, code: int, stderr: str) -> None:
    write(folder / "main.py", f"from work import step\nstep(1)\n{source}\n")
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert (done.returncode, stderr in done.stderr) == (code, True)
    plain = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, check=False)
    assert plain.returncode == code
    tracebacks = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert tracebacks == [line for line in plain.stderr.splitlines() if line.startswith("  File")]


def test_a_host_that_is_terminated_flushes_first_and_its_own_handler_wins(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import signal, sys, time
        from work import step
        step(1)
        if "own" in sys.argv:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        print("ready", flush=True)
        for _ in range(6000):  # Python sees a signal that comes just before a sleep only after it
            time.sleep(0.1)
        """,
    )
    for arguments, code in (([], -15), (["own"], 3)):
        host = subprocess.Popen(
            [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        host.send_signal(signal.SIGTERM)
        _, stderr = host.communicate(timeout=240)
        assert (host.returncode, "step" in stderr) == (code, True)
    assert len(traces()) == 2


@pytest.mark.slow
def test_children_that_inherit_the_environment_are_instrumented_too(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import multiprocessing, subprocess, sys
        from work import step

        def child(x):
            return step(x)

        if __name__ == "__main__":
            subprocess.run([sys.executable, "-c", "from work import step; step(1)"], check=True)
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(child, [1, 2]))
                    pool.close()
                    pool.join()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
        """,
    )
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert (done.returncode, done.stdout) == (0, "[2, 3]\n[2, 3]\n"), done.stderr
    loaded = [chrome.load(path)[0] for path in traces()]
    assert sorted(len(trace.spans) for trace in loaded) == [1, 2, 2], "the parent has recorded nothing"


def test_the_service_is_the_same_with_and_without_us_for_what_it_can_ask(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import inspect, pickle, signal, sys, threading, work
        print(inspect.signature(work.step), work.step.__name__, work.step.__module__, work.step.__doc__)
        print(pickle.loads(pickle.dumps(work.step)) is work.step)
        print([entry for entry in sys.path], sys.argv, sys.flags.optimize)
        print([thread.name for thread in threading.enumerate()])
        print("sitecustomize" in sys.modules, type(work.__loader__).__name__, work.__spec__.loader is work.__loader__)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """,
    )
    plain = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, check=True)
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    wanted, found = plain.stdout.splitlines(), done.stdout.splitlines()
    assert found[:4] == wanted[:4]
    assert found[5:] == wanted[5:]
    assert found[4].endswith("SourceFileLoader True")


def test_the_sitecustomize_of_the_host_still_runs(folder: Path) -> None:
    write(folder / "hostsite" / "x", "") if (folder / "hostsite").mkdir() else None
    write(folder / "hostsite" / "sitecustomize.py", "import os; os.environ['HOST_SITE'] = 'ran'")
    write(folder / "main.py", "import os; from work import step; step(1); print(os.environ.get('HOST_SITE'))")
    done = run(
        "run", "--profile", "profile.yaml", "--", "main.py", env={**os.environ, "PYTHONPATH": str(folder / "hostsite")}
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert len(traces()) == 1


def test_off_by_environment_runs_the_host_even_with_a_bad_profile_and_writes_nothing(folder: Path) -> None:
    write(folder / "main.py", MAIN)
    write(folder / "profile.yaml", "servce: x")
    done = run("run", "--profile", "profile.yaml", "--", "main.py", env={**os.environ, "INSTRUMENT": "off"})
    assert (done.returncode, done.stderr) == (0, "")
    assert traces() == []


def test_no_variable_of_the_environment_keeps_a_service_from_starting_and_each_is_named(folder: Path) -> None:
    environ = {
        **os.environ,
        "INSTRUMENT": "disabled",
        "INSTRUMENT_PROFILE": "nowhere.yaml",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1ms",
        "OTEL_BSP_SCHEDULE_DELAY": "5000",
        "OTEL_PROPAGATORS": "nobody",
    }
    write(folder / "main.py", MAIN)
    done = run("run", "--", "main.py", env=environ)
    assert (done.returncode, done.stdout.split()[0]) == (0, "2"), done.stderr
    for words in (
        "instrument: INSTRUMENT: found 'disabled'",
        "instrument: INSTRUMENT_PROFILE: found 'nowhere.yaml'",
        "instrument: no profile, so the preset serving",
        "instrument: exports to the collector at http://127.0.0.1:9/v1/traces (from OTEL_EXPORTER_OTLP_ENDPOINT)",
        "instrument: export.otlp.protocol (from OTEL_EXPORTER_OTLP_PROTOCOL): found 'http/json'",
        "instrument: export.otlp.timeout (from OTEL_EXPORTER_OTLP_TIMEOUT): found '1ms'",
        "instrument: set without an effect: OTEL_BSP_SCHEDULE_DELAY",
        "OTEL_PROPAGATORS: Propagator nobody not found",
    ):
        assert done.stderr.count(words) == 1, done.stderr
    assert "Traceback" not in done.stderr


THREE_MISTAKES = """\
servce: shop
functions:
  - match: "work:step"
    kind: requst
limits: {ring: 64}
"""


def test_check_prints_three_mistakes_with_their_places(folder: Path) -> None:
    (folder / "bad.yaml").write_text(THREE_MISTAKES)
    for verb in (["check", "bad.yaml"], ["run", "--profile", "bad.yaml", "--", "main.py"]):
        done = run(*verb)
        *lines, last = done.stderr.splitlines()
        assert done.returncode == 2
        assert last == "instrument: `instrument help profile` describes every key"
        assert [line.split(":")[:3] for line in lines] == [
            ["bad.yaml", "1", "1"],
            ["bad.yaml", "4", "11"],
            ["bad.yaml", "5", "16"],
        ]
        assert "'service'" in lines[0]
        assert "'request'" in lines[1]


def test_check_shows_what_each_rule_matches_and_fails_on_one_that_matches_nothing(folder: Path) -> None:
    done = run("check", "profile.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "work:step: attached" in done.stdout
    write(folder / "miss.yaml", 'functions: [{match: "work:stp"}, {match: "work:step"}]')
    done = run("check", "miss.yaml")
    assert done.returncode == 2
    assert "nearest is work:step" in done.stderr
    assert "attached" in done.stdout


BAD: list[tuple[list[str], str]] = [
    (["check", "missing.yaml"], "missing.yaml"),
    (["check", "broken.yaml"], "broken.yaml:1:"),
    (["check", "import.yaml"], "broken_module fails to import: RuntimeError: boom"),
    (["run", "--preset", "servin", "--", "main.py"], "'servin'; allowed: serving, training, vllm, "),
    (["report", "empty.json", "--view", "requsts"], "did you mean 'requests'?"),
    (["report", "empty.json", "--sorted-by", "totl"], "did you mean 'total'?"),
    (["convert", "empty.json", "--to", "crome"], "did you mean 'chrome'?"),
    (["run", "--profile", "profile.yaml"], "there is no command to run"),
    (["run", "--profile", "profile.yaml", "--", "absent.py"], "there is no file"),
    (["run", "--profile", "profile.yaml", "--", "absent", "app:app"], "run a module with `-- -m absent`"),
    (["run", "--profile", "profile.yaml", "--", "python"], "give it as to a shell"),
    (["run", "--profile", "profile.yaml", "--", "python", "-I", "main.py"], "the option -I of Python"),
    (["run", "--profile", "profile.yaml", "--", "./profile.sh"], "make it so with `chmod +x profile.sh`"),
    (["run", "--profile", "profile.yaml", "--", "serve", "app:app"], "and this is "),
    (["run", "--profile", "profile.yaml", "--", "other/python3", "main.py"], "there, and use its `instrument`"),
    (
        ["run", "--profil", "profile.yaml", "--", "main.py"],
        "`instrument run` has no option '--profil'; did you mean '--p",
    ),
    (["report", "empty.json", "--reqest", "r3"], "did you mean '--request'?"),
    (["reprot", "empty.json"], "there is no command 'reprot'; allowed: init, run, "),
    (["reprot", "empty.json"], "did you mean 'report'?"),
    (["reload", "--pid", "abc"], "found 'abc'; allowed: 1 or more"),
    (["-x", "report", "empty.json"], "`instrument` has no option '-x'; `--help` lists its options"),
    (["recover", "."], "give the folder of limits.ring_dir in the profile"),
    (["run", "--profile", "profile.yaml", "--", "-X", "utf8", "-OI", "main.py"], "the option -OI of Python"),
    (["run", "--profile", "profile.yaml", "--", "-Em", "work"], "prevents the start of the session"),
    (["check", "exit.yaml"], "exiting_module fails to import: SystemExit: 0"),
    (["check", "wild.yaml"], "wo*:step: waiting (wo* not imported); name modules of it to import"),
    (["report", "empty.json", "--rows", "0"], "found '0'; allowed: 1 or more"),
    (
        ["report", "empty.json", "--view", "events,devise"],
        f"found 'devise'; allowed: {', '.join(VIEWS)}; did you mean",
    ),
    (["report", "missing.json"], "missing.json"),
    (["report", "empty.json"], "empty.json"),
    (["report", "text.json"], "text.json"),
    (["report", "cut.json"], "cut.json"),
    (["report", "cut.json.gz"], "cut.json.gz"),
    (["report", "brackets.json"], "brackets.json"),
    (["report", "/dev/null"], "not a regular file"),
]

EACH = """
import importlib, json, os, runpy, sys
from instrument.cli import VERBS
for module in VERBS.values():
    importlib.import_module(f"instrument.cli.{module}")  # once for all
told = []
for arguments in json.loads(sys.argv[1]):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        sys.argv[1:] = arguments
        runpy.run_module("instrument", run_name="__main__", alter_sys=True)
    os.close(write)
    with open(read) as file:
        errors = file.read()
    told.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), errors))
json.dump(told, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and standard error of `instrument` for each of `BAD`, by what it says."""
    folder = tmp_path_factory.mktemp("bad")
    write(folder / "work.py", WORK)
    write(folder / "profile.yaml", PROFILE)
    (folder / "bin").mkdir()
    (folder / "bin" / "serve").write_text(f"#!{folder}/other/python3\n")
    (folder / "bin" / "serve").chmod(0o755)
    (folder / "other").mkdir()
    (folder / "other/python3").write_bytes(b"\x7fELF")
    (folder / "profile.sh").write_text("#!/bin/sh\n")
    (folder / "broken.yaml").write_text("functions: [")
    (folder / "import.yaml").write_text('functions: [{match: "broken_module:f"}]')
    (folder / "broken_module.py").write_text("raise RuntimeError('boom')")
    (folder / "exit.yaml").write_text('functions: [{match: "exiting_module:f"}]')
    (folder / "exiting_module.py").write_text("raise SystemExit(0)")
    (folder / "wild.yaml").write_text('functions: [{match: "wo*:step"}]')
    (folder / "empty.json").write_text("")
    (folder / "text.json").write_text("hello")
    whole = json.dumps({"traceEvents": [{"name": "x", "ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]})
    (folder / "cut.json").write_text(whole[:-20])
    (folder / "cut.json.gz").write_bytes(gzip.compress(whole.encode())[:-9])
    with (folder / "brackets.json").open("wb") as file:  # 10 GB of it, sparse beyond the first 64 MiB
        file.write(b"[" * (64 << 20))
        file.truncate(10 << 30)
    before = sorted(path.name for path in folder.iterdir())
    environ = {name: value for name, value in os.environ.items() if name not in OURS}
    environ["PATH"] = os.pathsep.join([f"{folder}/bin", str(Path(sys.executable).parent), environ["PATH"]])
    told = tmp_path_factory.mktemp("told") / "told.json"
    command = [sys.executable, "-c", EACH, json.dumps([arguments for arguments, _ in BAD]), str(told)]
    subprocess.run(command, cwd=folder, env=environ, timeout=240, check=True, capture_output=True)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before
    return {
        says: (code, errors.replace(str(folder), "{folder}"))
        for (_, says), (code, errors) in zip(BAD, json.loads(told.read_text()), strict=True)
    }


@pytest.mark.parametrize("says", [says for _, says in BAD])
def test_bad_input_is_one_clear_error_exit_code_2_and_no_traceback(
    says: str, refusals: dict[str, tuple[int, str]]
) -> None:
    code, errors = refusals[says]
    assert code == 2, errors
    assert says in errors
    assert "Traceback" not in errors


def test_check_and_run_refuse_a_ring_that_no_machine_has_memory_for(folder: Path) -> None:
    (folder / "large.yaml").write_text("limits: {ring: 100TB}")
    says = "large.yaml:1:16: limits.ring: found '100TB'; allowed: at most the memory that this machine has"
    for verb in (["check", "large.yaml"], ["run", "--profile", "large.yaml", "--", "-c", "pass"]):
        done = subprocess.run(
            [sys.executable, "-m", "instrument", *verb], cwd=folder, capture_output=True, text=True, check=False
        )
        assert (done.returncode, says in done.stderr) == (2, True)


def test_report_prints_the_table_of_a_saved_trace(folder: Path) -> None:
    write(folder / "main.py", "from work import step\nfor i in range(5): step(i)\n")
    run("run", "--profile", "profile.yaml", "--", "main.py")
    (path,) = traces()
    done = run("report", path, "--tracer-option", "AllOpDetail", "--sorted-by", "total")
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("thread0::step"))
    assert row.split()[1] == "5"
    assert "step0" in done.stdout
    assert "Sorted by total time" in done.stdout


@pytest.mark.parametrize(
    ("asked", "titles"),
    [
        pytest.param(["--tracer-option", "OpDetail"], ["Profiling"], marks=pytest.mark.slow),
        (["--state", "CPU"], ["Profiling"]),
        pytest.param(["--view", "device"], ["Device"], marks=pytest.mark.slow),
        (["--view", "copies,events"], ["Copies", "Profiling"]),
        (["--view", "device", "--view", "copies", "--rows", "1"], ["Device", "Copies"]),
    ],
)
def test_report_shows_the_views_in_the_order_asked(folder: Path, asked: list[str], titles: list[str]) -> None:
    on = (DeviceInterval(0, 7, 2_000_000, 6_000_000),)
    facts = (("direction", "h2d"), ("sync", False), ("pinned", False))
    copy = Site("memcpy h2d", "copy", "torch", "Tensor.to", device=True, attributes=facts)
    spans = [
        Span(Site("chat", "request"), 1, 0, 1, 1, 0, 0, 8_000_000, 8_000_000, 0),
        Span(copy, 2, 1, 1, 1, 0, 1_000_000, 2_000_000, 0, 0, attributes={"bytes": 16_000_000}, device=on),
    ]
    trace = Trace(Origin(1, "shop", 0, 0), 0, 10_000_000, spans, losses={"spans overwritten": 7})
    done = run("report", chrome.dump(folder / "t.json.gz", trace), *asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"-> +(\w+) Report", done.stdout) == titles
    assert done.stdout.count("Not kept: 7 (spans overwritten)") == 1
    if "Device" in titles:
        assert "Busy with copies alone                        4         40.0%" in done.stdout
    if "Copies" in titles:
        assert "torch.Tensor.to  h2d        1      16  4       1     4     device  pageable  async*" in done.stdout


@pytest.mark.parametrize(
    ("output", "codes", "message"),
    [
        ("pipe", {141}, ""),  # as of `| head`; never the 1 of a regression
        ("closed", {0, 3}, ""),
        ("/dev/full", {2}, "instrument: [Errno 28] No space left on device\n"),
    ],
)
def test_an_output_that_nobody_reads_is_no_verdict(folder: Path, output: str, codes: set[int], message: str) -> None:
    write(folder / "main.py", "from work import step\nstep(1)\n")
    run("run", "--profile", "profile.yaml", "--", "main.py")
    (path,) = traces()
    reader, writer = os.pipe()
    os.close(reader)
    with Path(output if output == "/dev/full" else os.devnull).open("w") as file:
        stdout = writer if output == "pipe" else file
        for words in (f"report {path}", f"compare {path} {path} --fail-over 3%", f"query {path} 'select 1'", "help"):
            command = f"{sys.executable} -m instrument {words} {'>&-' if output == 'closed' else ''}"
            done = subprocess.run(command, shell=True, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
            assert (done.returncode in codes, done.stderr) == (True, message), (words, done.returncode)
    os.close(writer)


def test_an_unexpected_exception_of_ours_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(help_verb, "show_topic", lambda *_: 1 // 0)
    assert main(["help"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_help_names_the_verbs() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in ("run", "check", "report"):
        assert verb in done.stdout


@pytest.mark.slow
def test_a_process_that_ends_at_once_still_delivers_with_its_resource(folder: Path) -> None:
    write(folder / "main.py", "from work import step\nstep(1)\n")
    write(folder / "otlp.yaml", 'functions: [{match: "work:step"}]\nexport: {otlp: {}}')
    with receiver() as collector:
        environ = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.http_port}",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test%20bench",
        }
        for _ in range(5):
            done = run("run", "--profile", "otlp.yaml", "--", "main.py", env=environ)
            assert (done.returncode, done.stderr) == (0, "")
        spans = read_until(collector.spans, lambda spans: len(spans) == 5)
    assert [span.name for span in spans] == ["step"] * 5
    assert {span.resource["deployment.environment.name"] for span in spans} == {"test bench"}
    assert len({span.resource["service.instance.id"] for span in spans}) == 5


@pytest.mark.slow
def test_without_a_profile_spans_go_to_the_collector_that_a_variable_names_unless_another_says_none(
    folder: Path,
) -> None:
    write(folder / "main.py", "from instrument import scope\nwith scope('request', kind='request'): pass\n")
    with receiver() as collector:
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.http_port}"}
        for none in ({"OTEL_TRACES_EXPORTER": "none"}, {}):
            done = run("run", "--", "main.py", env={**environ, **none})
            assert done.returncode == 0, done.stderr
            spans = read_until(collector.spans, lambda spans, none=none: bool(none or spans))
            assert [span.name for span in spans] == ([] if none else ["request"])
