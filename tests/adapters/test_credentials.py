"""The credentials file: what it takes, what a bad one says, and that a bad one changes nothing."""

import logging
import os
from pathlib import Path

import pytest

from tokenfleet.adapters.credentials import Credentials, credentials_of, new_token, read_callers, token_sha256
from tokenfleet.adapters.settings import token_of
from tokenfleet.core.errors import ForeignTenantError, SetupError, UnauthenticatedError
from tokenfleet.core.identity import ANYONE, Caller

A, B = "a" * 64, "b" * 64


def entry(name: str = "g", *, sha256: str = A, roles: str = '["gateway"]', more: str = "") -> str:
    return f'[credentials.{name}]\ntoken_sha256 = "{sha256}"\nroles = {roles}\n{more}\n'


def written(folder: Path, toml: str) -> Path:
    file = folder / "credentials.toml"
    file.write_text(toml)
    return file


def changed(file: Path, toml: str) -> None:
    """Another text, at another time, however coarse the clock of the disk."""
    before = file.stat().st_mtime_ns
    file.write_text(toml)
    os.utime(file, ns=(before + 10**9, before + 10**9))


BAD = {
    "": "missing required field credentials",
    "[credentials]": "length >= 1",
    "x = ": "nvalid value",
    entry(sha256="a" * 63): "token_sha256",
    entry(sha256="A" * 64): "token_sha256",
    entry(roles="[]"): "roles",
    entry(roles='["king"]'): "'king'",
    entry(more="tenants = []"): "tenants",
    entry(more='tenants = [""]'): "tenants",
    entry(more='tenant = "acme"'): "unknown field tenant",
    entry(more='token = "secret-in-clear"'): "unknown field token",
    entry("g") + entry("h"): "g and h have one token",
    entry("g") + entry("g"): "",  # TOML has no second table of a name
}


@pytest.mark.parametrize("toml", BAD)
def test_a_bad_file_is_told_with_file_key_and_remedy(toml: str, tmp_path: Path) -> None:
    file = written(tmp_path, toml)
    with pytest.raises(SetupError) as caught:
        read_callers(file)
    words = str(caught.value)
    assert (str(file) in words, BAD[toml].lower() in words.lower()) == (True, True), words
    assert "`tokenfleet credentials new`" in words
    assert "\n" not in words
    assert "secret-in-clear" not in words


def test_a_file_that_is_not_there_is_told_by_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"TOKENFLEET_CREDENTIALS: can't read .*none: No such file"):
        credentials_of(str(tmp_path / "none"))


def test_a_caller_is_found_by_its_token_and_nobody_by_another_s_hash(tmp_path: Path) -> None:
    token = new_token()
    known = Credentials(written(tmp_path, entry(sha256=token_sha256(token), more='tenants = ["acme"]')))
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert known.caller(f"{scheme} {token}") == Caller(
            name="g", roles=frozenset({"gateway"}), tenants=frozenset({"acme"})
        )
    for wrong in ("", token, f"Basic {token}", f"Bearer {token}x", f"Bearer {token_sha256(token)}", "Bearer "):
        with pytest.raises(UnauthenticatedError):
            known.caller(wrong)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(token.startswith("tf_") and len(token) >= 46 and token.isascii() for token in tokens)


def test_a_changed_file_is_read_again_and_a_bad_one_leaves_the_last_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = new_token(), new_token()
    file = written(tmp_path, entry(sha256=token_sha256(first)))
    known = Credentials(file)
    changed(file, "broken")
    with caplog.at_level(logging.ERROR):
        known.refresh()
        known.refresh()
    assert len(caplog.records) == 1  # once, not each second
    assert known.caller(f"Bearer {first}").name == "g"
    file.unlink()
    known.refresh()
    assert known.caller(f"Bearer {first}").name == "g"
    file.write_text(entry("h", sha256=token_sha256(second)))
    known.refresh()
    assert known.caller(f"Bearer {second}").name == "h"
    with pytest.raises(UnauthenticatedError):
        known.caller(f"Bearer {first}")


def test_a_tenant_is_the_same_however_its_accents_are_written(tmp_path: Path) -> None:
    [caller] = read_callers(written(tmp_path, entry(more='tenants = ["cafe\u0301"]'))).values()
    assert caller.tenant("caf\u00e9") == "caf\u00e9"


def test_a_caller_speaks_for_its_tenants_and_no_others() -> None:
    one = Caller(name="one", roles=frozenset(), tenants=frozenset({"acme"}))
    two = Caller(name="two", roles=frozenset(), tenants=frozenset({"acme", "globex"}))
    assert (one.tenant(""), one.tenant("acme"), two.tenant("globex"), ANYONE.tenant("x")) == (
        "acme",
        "acme",
        "globex",
        "x",
    )
    for caller, named in ((one, "globex"), (one, "ACME"), (two, ""), (two, "initech")):
        with pytest.raises(ForeignTenantError, match=f"tenant: {caller.name} speaks for: acme"):
            caller.tenant(named)
    assert (one.speaks_for("acme"), one.speaks_for("globex"), ANYONE.speaks_for("globex")) == (True, False, True)


def test_ten_thousand_names_of_tenants_from_one_credential_are_one() -> None:
    one = Caller(name="one", roles=frozenset(), tenants=frozenset({"acme"}))
    named: set[str] = set()
    for n in range(10_000):
        with pytest.raises(ForeignTenantError):
            named.add(one.tenant(f"acme-{n}"))
        named.add(one.tenant("" if n % 2 else "acme"))
    assert named == {"acme"}


def test_a_caller_s_own_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("tf_of-the-file\n")
    assert token_of({}) == ""
    assert token_of({"TOKENFLEET_TOKEN": "tf_x"}) == "tf_x"
    assert token_of({"TOKENFLEET_TOKEN": "tf_x", "TOKENFLEET_TOKEN_FILE": str(file)}) == "tf_of-the-file"
    with pytest.raises(SetupError, match="TOKENFLEET_TOKEN_FILE"):
        token_of({"TOKENFLEET_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(SetupError, match="plain ASCII"):
        token_of({"TOKENFLEET_TOKEN": "tök"})
