"""The alarm of a gate that refuses nobody: a metric while it lasts, a line of the log at each change."""

import logging

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town
from tokenfleet.adapters.gate_alarm import ALARM, GateAlarm
from tokenfleet.core.slomax.feasible import Ahead
from tokenfleet.core.slomax.terms import GatePolicy

HOPELESS = Ahead(wait_s=0.0, prefill_s=1.0, elapsed_s=3.0, ttft_max_s=2.0)


def test_it_is_raised_once_shows_in_the_metric_and_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    site = Town("b", small=1).site
    terms = GatePolicy(enabled=True, probe_share=1.0, probes_min=1, again_after_s=0.0)
    site.adopt(replace(site.policy, slomax=replace(site.policy.slomax, gate=terms)))
    gate, alarm = site.gates.of("small-chat"), GateAlarm(site)
    with caplog.at_level(logging.INFO):
        alarm.look()
        assert caplog.records == []
        gate.judge("r1", HOPELESS)
        gate.ended("r1", in_time=True, now_s=0.0)
        alarm.look()
        alarm.look()
        assert ALARM.labels("small-chat")._value.get() == 1.0
        gate.judge("r2", HOPELESS)
        gate.ended("r2", in_time=False, now_s=1.0)
        alarm.look()
        assert ALARM.labels("small-chat")._value.get() == 0.0
    warned, taken_back = caplog.records
    assert (warned.levelname, taken_back.levelname) == ("WARNING", "INFO")
    assert "small-chat refuses nobody" in warned.getMessage()
    assert "100% of 1" in warned.getMessage()
