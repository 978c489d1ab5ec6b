"""The token of whoever asks goes along with every call of the client and of the commands."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from tests.adapters.desks import Office, event, request
from tests.adapters.test_identity import credentials
from tokenfleet.adapters.credentials import read_callers, token_sha256
from tokenfleet.client import calls
from tokenfleet.client.credential_commands import credentials_app
from tokenfleet.client.gateway import Gateway
from tokenfleet.core.errors import SetupError
from tokenfleet.wire.v1 import scheduler_pb2


async def test_a_gateway_shows_its_token_on_each_of_its_ways(tmp_path: Path) -> None:
    office = Office(small=1)
    async with office.serving(credentials(tmp_path, g={"roles": ["gateway"], "tenants": ["acme"]})) as (server, _):
        address = f"127.0.0.1:{server.port}"
        async with Gateway([address], token="g") as fleet:
            unary = await fleet.schedule(request("r1", tenant=""))
            held = await fleet.schedule(request("r2", tenant="", wait_max_s=0.1))
            routed = await fleet.route(request("r3", tenant=""))
            assert [each.tenant for each in (unary.decision, held.decision, routed)] == ["acme"] * 3
            fleet.report(event("r1", tenant="", decision=unary.decision.id, instance=unary.decision.target))
            await fleet.drained()
            assert unary.decision.id not in office.town.site.ledger
        async with Gateway([address], token="other") as fleet:
            for asked in (fleet.schedule, fleet.route):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked(request("r4"))
                internal = "execute_batch" in (caught.value.debug_error_string() or "")  # a stream refused unwritten
                assert internal or caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_commands_show_the_token_of_the_environment_and_say_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = credentials(tmp_path, all={"roles": ["gateway", "operator"]}, g={"roles": ["gateway"]})
    async with Office(small=1).serving(known) as (server, _):
        targets = [f"127.0.0.1:{server.port}"]
        monkeypatch.setenv("TOKENFLEET_TOKEN", "all")
        assert (await calls.schedule(targets, request("r1"), dry_run=True)).tenant == "acme"
        assert (await calls.route(targets, request("r2"), dry_run=True)).tenant == "acme"
        assert (await calls.what_if(targets, request("r3"), scheduler_pb2.Changes())).pool == "small-chat@b"
        assert (await calls.sites(targets)).site == "b"
        for token, words in (
            ("g", "may not call FleetMind/Sites"),
            ("x", "nobody is known by this token"),
            ("", "no token"),
        ):
            monkeypatch.setenv("TOKENFLEET_TOKEN", token)
            with pytest.raises(SetupError, match=f"refused the call .*{words}.*; TOKENFLEET_TOKEN"):
                await calls.sites(targets)


def test_a_new_credential_is_an_entry_that_the_file_takes_and_its_token_opens(tmp_path: Path) -> None:
    words = ["acme-gate", "--role", "gateway", "--role", "auditor", "--tenant", "acme", "--tenant", 'Müller "&" Co']
    printed = CliRunner().invoke(credentials_app, words)
    assert printed.exit_code == 0, printed.output
    line, _, entry = printed.stdout.partition("\n")
    file = tmp_path / "credentials.toml"
    file.write_text(entry)
    [(digest, caller)] = read_callers(file).items()
    assert digest == token_sha256(line.rpartition(" ")[2])
    assert (caller.name, caller.roles, caller.tenants) == (
        "acme-gate",
        {"gateway", "auditor"},
        {"acme", 'Müller "&" Co'},
    )
