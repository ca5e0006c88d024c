"""What holds for all tests."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell that runs the tests in its background has them ignore Ctrl-C, and so would the programs they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
