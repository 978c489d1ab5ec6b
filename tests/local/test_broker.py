"""The embedded broker answers on loopback, under a cluster id that no other start has."""

from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.ports import free_port
from tokenfleet.local import broker
from tokenfleet.local.children import Supervisor

pytestmark = pytest.mark.integration


async def cluster_id(port: int) -> str:
    admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{port}")
    await admin.start()
    try:
        return (await admin.describe_cluster())["cluster_id"]
    finally:
        await admin.close()


async def test_every_start_is_another_cluster(tmp_path: Path) -> None:
    port = free_port()
    seen: list[str] = []
    for _ in range(2):
        async with Supervisor(tmp_path) as fleet:
            await fleet.start(broker.program(port=port))
            await broker.until_ready(port=port)
            seen.append(await cluster_id(port))
    assert len(set(seen)) == 2


async def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    port = free_port()
    async with Supervisor(tmp_path) as fleet:
        await fleet.start(broker.program(port=port))
        await broker.until_ready(port=port)
        assert listening_addresses(port) == {"0100007F"}


def listening_addresses(port: int) -> set[str]:
    """Addresses on which somebody listens on this port, as /proc/net/tcp writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = "0A"
    return {row[1].split(":")[0] for row in rows if row[3] == listening and int(row[1].split(":")[1], 16) == port}


async def test_an_open_port_that_is_no_broker_is_not_ready() -> None:
    with pytest.raises(TimeoutError):
        await broker.until_ready(port=free_port(), wait_max_s=0.3)
