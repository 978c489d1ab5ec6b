"""Event time: whoever's clock is wrong, events are dated by what the broker's log tells."""

import pytest

from tests.core.test_goodput import SOURCES, T0, finished
from tokenfleet.core.goodput.event_time import LogClock, Watermark
from tokenfleet.core.records import OutcomeEnvelope


def test_a_clock_fifty_years_off_is_dated_by_the_broker() -> None:
    clock = LogClock()
    far = finished(at_s=-50 * 365 * 86400.0)
    envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=far.at_wall_s + 1.0, events=(far,))
    assert clock.date(envelope, T0 + 3.0) == [(far, T0 + 3.0)]
    assert clock.misdated == 1


def test_a_gateway_on_a_clock_of_its_own_is_dated_by_that_clock_s_offset_and_a_late_report_of_it_too() -> None:
    clock = LogClock()

    def dated(at_s: float, *, name: str, appended_s: float) -> float:
        """The replica that passes it on keeps good time."""
        one = finished(at_s=at_s, clock=name)
        envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=T0 + appended_s, events=(one,))
        [(_, event_s)] = clock.date(envelope, T0 + appended_s)
        return event_s - T0

    assert dated(10.0, name="good", appended_s=10.1) == pytest.approx(10.1)
    assert dated(20.0, name="slow", appended_s=50.0) == 50.0  # 30 s behind: the broker's time
    assert dated(80.0, name="fast", appended_s=50.0) == 50.0
    assert dated(15.0, name="good", appended_s=55.0) == pytest.approx(15.1)  # reported late, on a good clock
    assert clock.misdated == 2


def test_a_small_offset_is_taken_from_the_quickest_envelope() -> None:
    clock = LogClock()
    for delay_s in (0.9, 0.2, 5.0):
        one = finished(at_s=delay_s)
        envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=one.at_wall_s, events=(one,))
        [(_, at_s)] = clock.date(envelope, one.at_wall_s + delay_s)
    assert at_s == pytest.approx(one.at_wall_s + 0.2)


def test_the_watermark_waits_for_active_logs_only() -> None:
    watermark = Watermark(SOURCES, lag_s=5.0, idle_s=5.0)
    watermark.heard("b", T0 + 100.0, now_s=0.0)
    assert watermark.at(0.0) is None, "neither log was read to its end"
    watermark.caught_up("b")
    watermark.caught_up("c")
    watermark.heard("c", T0 + 90.0, now_s=0.0)
    assert watermark.at(1.0) == T0 + 85.0
    watermark.heard("b", T0 + 106.0, now_s=6.0)
    assert watermark.at(6.0) == T0 + 101.0, "c is idle"
    assert watermark.at(16.0) == T0 + 111.0, "all are idle: this process's clock goes on"
    watermark.heard("c", T0 + 91.0, now_s=17.0)
    assert watermark.at(17.0) == T0 + 111.0, "it never goes back"
