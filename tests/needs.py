"""What a make target needs of the machine besides Python; run before anything is built.

python3 -m tests.needs TARGET              status 1 and what to do, where something is missing
python3 -m tests.needs --packages TARGET   Debian's names of what is missing, for a script
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys

_MONITORING = {"prometheus": "prometheus", "promtool": "prometheus", "node": "nodejs", "npm": "npm"}

#: Programs and libraries by target, each with the Debian package that has it.
NEEDS = {
    # Mooncake's library is linked to it, though it uses TCP here; Prometheus watches the fleet.
    "storage-test": {"libibverbs.so.1": "libibverbs1", "prometheus": "prometheus"},
    "monitoring-test": _MONITORING,
    "dashboards-preview": {**_MONITORING, "chromium": "chromium"},
    "compose-test": {
        "docker": "docker.io",
        "dockerd": "docker.io",
        "iptables": "iptables",
        "ip": "iproute2",
        # For base images where no registry answers.
        "debootstrap": "debootstrap",
    },
}


def missing(target: str) -> dict[str, str]:
    """What ``target`` needs and this machine lacks, each with its package."""
    if target == "compose-test" and engine_answers():
        return {}
    return {name: package for name, package in NEEDS[target].items() if not there(name)}


def is_library(name: str) -> bool:
    """Whether ``name`` is a library's (name.so.N), not a program's."""
    return ".so." in name


def there(name: str) -> bool:
    """Whether this machine has the program or the library."""
    if not is_library(name):
        return shutil.which(name) is not None
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def engine_answers() -> bool:
    """Whether Docker's client reaches an engine, which needs nothing more of this machine."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True).returncode == 0


def complaint(target: str) -> str | None:
    """What to do before ``target`` can run; None where it can."""
    lacking = missing(target)
    if lacking:
        packages = " ".join(sorted(set(lacking.values())))
        root = "" if os.geteuid() == 0 else "sudo "
        return (
            f"make {target} needs {', '.join(lacking)}, which this machine lacks. Install with\n"
            f"  {root}apt-get install -y --no-install-recommends {packages}"
        )
    if target == "compose-test" and os.geteuid() != 0 and not engine_answers():
        return (
            "make compose-test needs a Docker engine: none answers, and only root can start one. "
            "Start Docker, set DOCKER_HOST, or run\n  sudo make compose-test"
        )
    return None


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(NEEDS))
    parser.add_argument("--packages", action="store_true", help="print package names alone")
    arguments = parser.parse_args()
    if arguments.packages:
        print(" ".join(sorted(set(missing(arguments.target).values()))))
        return 0
    text = complaint(arguments.target)
    if text:
        print(text, file=sys.stderr)
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main())
