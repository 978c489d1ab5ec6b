"""Discovery: one spelling for an address, and a file that is never worse than its last good version."""

from pathlib import Path

import pytest

from tokenfleet.adapters.engines.addresses import canonical_address
from tokenfleet.adapters.engines.discovery import ENGINES_MAX, DiscoveryFile, EngineSpec, parse_discovery
from tokenfleet.core.errors import PolicyError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("10.0.0.1", "10.0.0.1:8000"),
        ("fd00::10", "[fd00::10]:8000"),
        ("[fd00::10]:8000", "[fd00::10]:8000"),
        ("[FD00:0:0::0010]", "[fd00::10]:8000"),
        ("http://[fd00::10]:9000/", "[fd00::10]:9000"),
        ("fe80::1%eth0", "[fe80::1%eth0]:8000"),
        ("[fe80::1%eth0]:8000", "[fe80::1%eth0]:8000"),
        ("::ffff:10.0.0.1", "10.0.0.1:8000"),
        ("[::ffff:10.0.0.1]:8000", "10.0.0.1:8000"),
        ("GPU-7.example.:8001", "gpu-7.example:8001"),
        ("https://gpu-7", "gpu-7:443"),
    ],
)
def test_one_spelling_for_each_address(text: str, canonical: str) -> None:
    assert canonical_address(text) == canonical
    assert canonical_address(canonical) == canonical


@pytest.mark.parametrize(
    "text", ["", ":8000", "a b:80", "fd00::10:8000:x", "h:99999", "h:port", "http://u:p@h:1", "/x"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # urllib words some of them
        canonical_address(text)


ENGINE = '[[engine]]\nid = "{id}"\nsite = "b"\naddress = "{address}"\nmodel = "m"\n'


def listing(*engines: tuple[str, str]) -> str:
    return "".join(ENGINE.format(id=name, address=address) for name, address in engines)


def test_an_engine_has_defaults() -> None:
    (spec,) = parse_discovery(listing(("i1", "fd00::1")), source="f")
    assert spec == EngineSpec(
        id="i1", site="b", address="[fd00::1]:8000", model="m", metrics_url="http://[fd00::1]:8000/metrics"
    )


def test_equal_addresses_are_one_instance(caplog: pytest.LogCaptureFixture) -> None:
    specs = parse_discovery(listing(("i1", "::ffff:10.0.0.1"), ("i2", "10.0.0.1:8000"), ("i3", "10.0.0.2")), source="f")
    assert [spec.id for spec in specs] == ["i1", "i3"]
    assert "one instance" in caplog.text


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        (listing(("i1", "a:1")) + "colour = 'red'\n", "colour"),
        (listing(("i1", "a:x")), "i1"),
        (listing(("i1", "a:1"), ("i1", "a:2")), "two engines: i1"),
        (listing(("i1", "a:1")).replace('"b"', '"b/c"'), "site"),
        (listing(("i1", "a:1")) + "engine = 'llama.cpp'\n", "llama.cpp"),
        (listing(("i1", "a:1")) + "kv_endpoint = 'localhost:1'\n", "kv_endpoint"),
        (listing(*((f"i{n}", f"a:{n + 1}") for n in range(ENGINES_MAX + 1))), "at most"),
        ("[[engine", "f: "),
    ],
)
def test_a_bad_file_is_refused_and_says_where(toml: str, complaint: str) -> None:
    with pytest.raises(PolicyError, match=r"^f: ") as caught:
        parse_discovery(toml, source="f")
    assert complaint in str(caught.value)


def test_a_bad_file_keeps_the_last_good_engines(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    file = DiscoveryFile(path)
    assert (file.refresh(), file.engines) == (False, ())
    assert "No such file" in file.problem
    path.write_text(listing(("i1", "a:1")))
    assert file.refresh()
    assert ([spec.id for spec in file.engines], file.problem) == (["i1"], "")
    assert not file.refresh()
    path.write_text("[[engine")
    assert not file.refresh()
    assert [spec.id for spec in file.engines] == ["i1"]
    assert file.problem
    path.write_text(listing(("i1", "a:1")) + "\n")
    assert not file.refresh()  # other bytes, the same engines
    assert file.problem == ""
    path.unlink()
    assert not file.refresh()
    assert [spec.id for spec in file.engines] == ["i1"]
    path.write_text(listing(("i2", "a:1")))
    assert file.refresh()
    assert [spec.id for spec in file.engines] == ["i2"]
