"""Hearing: a record of Kafka as a fact for a Site."""

from typing import Any

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.core.errors import BadRecordError, PolicyError
from tokenfleet.core.site import Heard, Site


def hear(site: Site, record: Record[Any]) -> None:
    """Hands the record to `site`. Raises BadRecordError for a policy that can't be used: a dead letter."""
    how = Heard(
        partition=record.partition,
        offset=record.offset,
        now_s=record.read_at_s,
        live=record.live,
        age_s=0.0 if record.live else max(0.0, wall_s() - record.appended_wall_s),
    )
    try:
        site.heard(record.message, how)
    except PolicyError as error:
        raise BadRecordError(str(error)) from error
