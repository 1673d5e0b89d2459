import os
import signal
import sys

from dino_vit.core.signals import Interruption
from tests.support.runs import server


def leave_after(names):
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = 1
        with Interruption() as interruption:
            interruption.in_steps = names[0] != "before"
            names = [name for name in names if name != "before"]
            assert not interruption.asked
            for name in names:
                os.kill(os.getpid(), name)
                assert interruption.asked
            if interruption.received == signal.SIGINT:  # a single one, after the step
                code = 130
            interruption.leave()
    except KeyboardInterrupt:
        pass
    except SystemExit as stop:
        code = stop.code
    assert signal.getsignal(signal.SIGTERM) == before
    sys.exit(code)


def test_signals_are_remembered_until_the_step_is_over():
    term, user, interrupt, at_once = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, 1
    cases = {
        (term,): 75,
        (user,): 75,
        (interrupt,): 130,
        (term, term): 75,
        (interrupt, term): 75,
        (interrupt, interrupt): at_once,
        (term, interrupt): at_once,
        ("before", interrupt): at_once,
        ("before", term): 75,
    }
    started = {names: server.Process(target=leave_after, args=(names,)) for names in cases}
    for process in started.values():
        process.start()
    for names, process in started.items():
        process.join()
        assert process.exitcode == cases[names], names
