"""Generate the gRPC stubs from TokenFleet's .proto files into ./generated.

python generate.py [PROTOS]
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parent.parent / "protos"


def generate(protos: Path, out: Path) -> int:
    """The exit code of protoc. Modules land in `out`/tokenfleet/wire/v1, as their imports of one another want it."""
    out.mkdir(exist_ok=True)
    files = sorted(str(file) for file in protos.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}"]
    return subprocess.run([*command, f"--python_out={out}", f"--grpc_python_out={out}", *files]).returncode


if __name__ == "__main__":
    sys.exit(generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS, HERE / "generated"))
