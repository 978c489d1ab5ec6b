"""Gate alarm: tells people when a feasibility gate refuses nobody, because what it refused could have been served."""

import logging
from typing import Final

from prometheus_client import Gauge

from tokenfleet.core.site import Site

log = logging.getLogger(__name__)

ALARM: Final = Gauge(
    "tokenfleet_gate_refuses_nobody", "1 while the model's feasibility gate was wrong too often to refuse", ["model"]
)


class GateAlarm:
    """The alarm of one site; `look` at it now and then."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._raised: dict[str, str] = {}

    def look(self) -> None:
        """Sets the metric, and logs what has changed since the last time."""
        raised = self._site.gates.refusing_nobody()
        for model, why in raised.items():
            ALARM.labels(model).set(1)
            if model not in self._raised:
                log.warning("the feasibility gate of %s refuses nobody any more: %s", model, why)
        for model in self._raised.keys() - raised.keys():
            ALARM.labels(model).set(0)
            log.info("the feasibility gate of %s refuses again", model)
        self._raised = raised
