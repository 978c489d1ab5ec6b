"""The house rules that no tool checks: nothing generated is stale, no file names a machine, files stay small."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WIRE = Path("tokenfleet/wire/v1")
LINES_MAX = 400  # a file past 300 is asked for its second noun; past this one it fails

# Where somebody's checkout or home stands. Written in pieces: this file is searched too.
MACHINE_PATHS = re.compile(r"(?<![\w.*-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "fa" + "rm"]) + r")/")
# Hosts from which packages are fetched: the settings of whoever builds say which.
REGISTRIES = re.compile(
    "|".join(
        [
            r"pypi\.o" + "rg",
            r"pythonhosted\.o" + "rg",
            r"registry\.npm" + "js",
            r"repo1?\.ma" + "ven",
            "artifact" + "ory",
        ]
    )
)


def tracked() -> list[Path]:
    """Files of the repository, also new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return sorted({Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()})


def test_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    subprocess.run([ROOT / "tools" / "protos", tmp_path], check=True, cwd=ROOT)
    fresh = {path.name: path.read_text() for path in (tmp_path / WIRE).iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "services" / WIRE).glob("*_pb2*")}
    assert sorted(kept) == sorted(fresh), "run tools/protos"
    assert [name for name in sorted(kept) if kept[name] != fresh[name]] == [], "run tools/protos"


def test_the_package_links_to_every_migration_and_schema() -> None:
    checked = subprocess.run([ROOT / "tools" / "links", "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize(
    ("wrong", "what"), [(MACHINE_PATHS, "a path of one machine"), (REGISTRIES, "the name of a package registry")]
)
def test_no_tracked_file_names_a_machine_or_a_registry(wrong: re.Pattern[str], what: str) -> None:
    found: list[str] = []
    for path in tracked():
        for number, line in enumerate((ROOT / path).read_bytes().decode(errors="replace").splitlines(), start=1):
            if match := wrong.search(line):
                found.append(f"{path}:{number}: {match.group()}")
    assert found == [], what


def test_every_file_is_small_enough_to_read() -> None:
    lengths = {
        str(path): len((ROOT / path).read_text().splitlines())
        for path in tracked()
        if path.parts[0] == "services" and path.suffix == ".py" and "wire" not in path.parts
    }
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_packages_hold_no_code_in_their_init_files() -> None:
    wordy = [
        str(path)
        for path in tracked()
        if path.parts[0] == "services" and path.name == "__init__.py" and "wire" not in path.parts
        if code_of((ROOT / path).read_text())
    ]
    assert wordy == []


def code_of(text: str) -> str:
    """What is left of a module without its docstring and comments."""
    without_docstring = re.sub(r'\A\s*"""(?:.|\n)*?"""', "", text)
    return re.sub(r"(?m)^\s*#.*$", "", without_docstring).strip()


def test_every_direct_dependency_is_pinned_once_and_exactly() -> None:
    pins = re.findall(r'^    "([\w.-]+)==[^;"]+(?: ; [^"]+)?",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    hashed = re.findall(r"^([\w.-]+)==\S+", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert set(hashed) <= set(pins), "run tools/pin"


def test_the_compose_file_is_yaml_with_services() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert compose["services"]
    assert all("image" in service or "build" in service for service in compose["services"].values())
