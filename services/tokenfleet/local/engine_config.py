"""Engine config: what the process of simulated engines is told; `up` writes it without loading an engine."""

import msgspec

HOST = "127.0.0.1"  # simulated engines check nobody: reachable from elsewhere only where `host` says so


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance: its ports and what it runs. kv_blocks None is the profile's memory."""

    id: str
    http_port: int
    kv_port: int
    kv_replay_port: int
    model: str
    profile: str
    block_size: int = 32
    seed: int = 0
    kv_blocks: int | None = None


class EnginesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fleet of one process. `host` is the address that all its ports are bound to; control_port None means none."""

    instances: list[InstanceConfig]
    control_port: int | None = None
    host: str = HOST
