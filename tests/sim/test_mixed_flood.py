"""One tenant's flood: what the others keep of their goodput and of their first tokens."""

import json
from time import process_time

from typer.testing import CliRunner

from tokenfleet.sim.commands import sim_app
from tokenfleet.sim.mixed.flood import FLOODING, run_flood
from tokenfleet.sim.mixed.run import MixedOptions
from tokenfleet.sim.mixed.workload import workload

SMALL = MixedOptions(instances=1, load=0.4, tenants=4, flood=8.0, seed=3)


def test_the_first_tenant_sends_so_many_times_its_chat_and_the_others_what_they_did() -> None:
    calm, flooded = (
        workload(load=0.5, instances=1, seed=3, chat="azure-conv", batch_deadline_s=240.0, tenants=5, flood=flood)
        for flood in (1.0, 10.0)
    )
    assert {row.tenant for row in calm} == {f"t{number}" for number in range(5)}
    assert [row for row in flooded if row.tenant != FLOODING] == [row for row in calm if row.tenant != FLOODING]
    chats = [sum(row.tenant == FLOODING and row.request_class == "chat" for row in rows) for rows in (calm, flooded)]
    assert 9.0 < chats[1] / chats[0] < 11.5


def test_the_others_keep_their_goodput_and_their_first_tokens_in_a_flood() -> None:
    result = run_flood(SMALL, cpu_s=process_time)
    assert result.flooded.flooding_requests > 1_000
    assert result.kept > 0.95
    assert result.flooded.others_attainment > 0.95
    assert (result.ttft_p99_ratio["chat"] or 9.0) < 1.3
    for side in (result.calm, result.flooded):
        assert side.refused_share["chat"] == 0.0
        assert side.served_ttft_s["chat"] == side.ttft_s["chat"]
        assert (side.ttft_s["long"].mean is None) == (side.refused_share["long"] > 0.0)
        assert side.served_ttft_s["long"].mean is not None
    assert result.flooded.flooding_goodput_tokens > result.calm.flooding_goodput_tokens  # what is left is the flood's


def test_the_command_tells_what_the_others_keep() -> None:
    arguments = ["run", "flood", "--instances", "1", "--load", "0.1", "--tenants", "3", "--flood", "2", "--seed", "3"]
    done = CliRunner().invoke(sim_app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {"kept", "ttft_p99_ratio", "calm", "flooded", "seed", "design"} <= told.keys()
    assert "the others keep" in CliRunner().invoke(sim_app, arguments).stdout
