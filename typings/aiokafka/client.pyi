from collections.abc import Callable
from typing import Any

from aiokafka.protocol import metadata

MetadataRequest: Callable[..., metadata.MetadataRequest]
AIOKafkaClient: Any
