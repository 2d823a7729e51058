"""Python that takes too long is interrupted, in whatever thread it runs."""

import sys
import threading
import time

import pytest

from dolmen.data.template import TimeLimitExceeded, limit_time


def endless() -> None:
    while True:
        pass


def limited(work, seconds: float) -> list:
    """What `work` came to within a limit, and what the thread could still do."""
    found = []
    try:
        with limit_time(seconds):
            found.append(work())
    except TimeLimitExceeded as error:
        found.append(str(error))
    found.append(sum(range(1000)))  # an exception that comes late would come here
    return found


def asleep() -> None:
    for _ in range(3):
        time.sleep(0.1)


@pytest.mark.parametrize("work", [endless, asleep])
@pytest.mark.parametrize("main", [True, False])
def test_what_takes_too_long_is_interrupted(work, main):
    found = []
    if main:
        found = limited(work, 0.05)
    else:
        thread = threading.Thread(target=lambda: found.extend(limited(work, 0.05)), daemon=True)
        thread.start()
        thread.join(10)
    assert found == ["it has taken over 0.05 s", 499500]


@pytest.mark.parametrize("main", [True, False])
def test_what_ends_in_time_is_left_alone(main):
    found = []

    def many() -> None:
        for _ in range(20):
            found.append(limited(lambda: 1, 0.001))
            found.append(limited(lambda: time.sleep(0.0009), 0.001)[-1:])

    if main:
        many()
    else:
        thread = threading.Thread(target=many)
        thread.start()
        thread.join(10)
    assert len(found) == 40 and all(one[-1] == 499500 for one in found)


def test_a_thread_that_was_limited_can_be_traced():
    """As coverage and debuggers do. A scheduled exception that is withdrawn leaves the
    interpreter's flag set, with which a traced thread of Python 3.11 never enters a function.
    """
    found = []

    def work() -> None:
        found.append(limited(lambda: 1, 5.0))
        found.append(limited(endless, 0.05))
        sys.settrace(lambda *_: None)
        found.append(limited(lambda: 2, 5.0))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert found == [[1, 499500], ["it has taken over 0.05 s", 499500], [2, 499500]]
