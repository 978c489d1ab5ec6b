"""Whether a Docker engine answers here."""

import subprocess

ANSWER_WAIT_MAX_S = 5.0


def docker_answers() -> bool:
    """A client without an engine is common; only an answer counts.

    Asked of the command, not of the Python client: that leaves its socket open when nobody answers.
    """
    try:
        asked = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, timeout=ANSWER_WAIT_MAX_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
