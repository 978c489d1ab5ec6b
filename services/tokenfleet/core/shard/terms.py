"""Terms: the times that owners and holders of a book agree on. Seconds.

A ttl is counted by the holder from when it sent the message that is answered, by the owner from when it read its own
answer back: the holder always stops first, and EARLY_S sooner, which covers clocks that differ by up to 5 %.
"""

from typing import Final

LEASE_TTL_S: Final = 5.0
GRANT_TTL_S: Final = 2.0
EARLY_S: Final = 0.25
RENEW_EVERY_S: Final = 1.0  # a request is given up after this, and the next one sent
KEEPALIVE_EVERY_S: Final = 1.0
HEARD_WITHIN_S: Final = 2.0  # a grant goes only to a ticket heard within
UNHEARD_MAX_S: Final = 10.0  # a ticket unheard for so long ends
SILENT_HOLD_S: Final = 30.0  # a silent holder's rest stays counted so long after it was last counted live
RECLAIM_AFTER_S: Final = 8.0  # an owner deposed by a late claim claims again: longer than a session of 6 s
AHEAD_AGAIN_S: Final = 60.0  # the minute of a quota: who heard that it is used up is not ahead of its owner within
WRITE_AGAIN_S: Final = 1.0  # what was not read back within is appended again: the same record
READ_BACK_S: Final = 900.0  # how far a new owner reads the log, and how long an ended ticket is remembered
