"""Plan: a day of the long loop, in steps of a minute, with flows instead of requests."""
