"""Ctrl-C at chosen places of a start, most of them inside of imports: one line and exit code 130."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from longturn.cli import interrupts
from longturn.cli.main import BENCH_VERBS, LOADS, SIMULATE_VERBS, VERBS, main

SCRIPT = """
import os, signal, sys
from longturn.__main__ import main

place = sys.argv.pop(1)

def profile(frame, event, arg):
    name = frame.f_code.co_name
    if event == "call" and place in (name, name == "<module>" and frame.f_globals.get("__name__")):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(profile)
sys.exit(main())
"""
"""Sends itself the signal when a function or a module of the given name begins."""
SERVE = ["serve", "--port", "0", "/nowhere"]
STEP = ["bench", "step"]


def interrupted(place: str, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SCRIPT, place, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("argparse", SERVE),
        ("longturn.cli.serve", SERVE),
        ("add_config_flags", SERVE),
        # Raised there, an interrupt would be printed and lost: it is a callback of the import system's locks.
        ("cb", SERVE),
        # There it would become a RuntimeError.
        ("__set_name__", SERVE),
        ("uvicorn", SERVE),
        ("bind", SERVE),  # imports are done, a KeyboardInterrupt is raised
        ("torch", STEP),
        ("numpy", STEP),
    ],
)
def test_one_line_wherever_it_comes(place: str, arguments: list[str]) -> None:
    assert interrupted(place, *arguments) == (130, "longturn: interrupted\n")


def test_the_signal_is_sent_where_the_test_says() -> None:
    """The test above must not pass because a place is never met."""
    code, errors = interrupted("a_place_that_is_not_there", *SERVE)
    assert code == 3 and "/nowhere" in errors


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As those that a script starts with `&`."""
    script = SCRIPT.replace("sys.exit(main())", "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsys.exit(main())")
    command = [sys.executable, "-c", script, "argparse", "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("longturn "), done.stderr


def test_a_program_that_calls_main_keeps_its_handler(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["version"]) == 0 and signal.getsignal(signal.SIGINT) is before


def test_what_became_of_an_interrupt_is_told_from_other_errors() -> None:
    caused, met = ImportError("numpy could not be imported"), ImportError("numpy could not be imported")
    caused.__cause__ = met.__context__ = KeyboardInterrupt()
    assert interrupts.was_interrupted(caused) and interrupts.was_interrupted(met)
    round_trip = ValueError()
    round_trip.__context__ = cause = KeyError()
    cause.__context__ = round_trip
    assert not interrupts.was_interrupted(round_trip)


def test_modules_that_verbs_load_are_there() -> None:
    for name in (name for names in LOADS.values() for name in names if name != "torch"):
        assert importlib.util.find_spec(name) is not None, name
    verbs = {*VERBS, *BENCH_VERBS, *(f"simulate_{name.replace('-', '_')}" for name in SIMULATE_VERBS)}
    assert verbs - {"bench", "version"} == set(LOADS)
