from collections.abc import Callable

from aiokafka.protocol import metadata

MetadataRequest: Callable[..., metadata.MetadataRequest]
