"""How many threads this process has.

The one rule: a thread that was joined does not count. The kernel wakes who waits for a thread before it takes the
thread out of ``/proc/self/task``, so that one look may still see it.
"""

import os
import time

LOOKS = 20


def lasting_threads():
    """Return the number of threads that are there in every one of several looks, 0.2 s long."""
    lasting = set(os.listdir("/proc/self/task"))
    for _ in range(LOOKS):
        time.sleep(0.01)
        lasting &= set(os.listdir("/proc/self/task"))
    return len(lasting)
