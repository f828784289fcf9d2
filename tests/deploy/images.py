"""Images for a stack: pulled where a registry answers, else base images made of Debian packages."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.deploy.engine import Engine, EngineError

REPOSITORY = Path(__file__).parents[2]

PYTHON = "python:3.11-slim-bookworm"
PROMETHEUS = "prom/prometheus:v3.13.2"
GRAFANA = "grafana/grafana:13.2.3"

#: The images of the CPU stacks that this repository builds.
BUILT = ("exporter", "loadgen", "router", "server-cpu")

#: The same paths, user and entry point as the official image has.
_PROMETHEUS_DOCKERFILE = f"""
FROM {PYTHON}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\
 && mkdir -p /prometheus && chown nobody:nogroup /prometheus
USER nobody
EXPOSE 9090
ENTRYPOINT ["prometheus"]
"""


def provide_base_images(engine: Engine, pip_conf: str) -> list[str]:
    """Pull the images that the stack does not build, or make them. Returns those not to be had.

    ``pip_conf`` goes into a Python image that is made here.

    Raises EngineError where debootstrap is missing.
    """
    if engine.has_image(PYTHON) and engine.has_image(PROMETHEUS):
        print("base images: there already", flush=True)
    elif engine.can_pull(PYTHON) and engine.can_pull(PROMETHEUS):
        print("base images: pulled", flush=True)
    else:
        print("base images: no registry answers; making them of Debian packages", flush=True)
        _bootstrap_python(engine, pip_conf)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Dockerfile").write_text(_PROMETHEUS_DOCKERFILE)
            _build(engine, Path(folder), "--tag", PROMETHEUS)
    return [] if engine.has_image(GRAFANA) or engine.can_pull(GRAFANA) else [GRAFANA]


def build(engine: Engine, version: str) -> None:
    """Build the stack's own images from this working tree."""
    for name in BUILT:
        print(f"building hiqcache/{name} ...", flush=True)
        file = str(REPOSITORY / "docker" / f"{name}.Dockerfile")
        _build(engine, REPOSITORY, "--file", file, "--tag", f"hiqcache/{name}:{version}")


def _build(engine: Engine, context: Path, *options: str) -> None:
    # The engine's own builder: BuildKit's client is a package that Debian 12 lacks. The host's
    # network: a package index may be reachable from nowhere else.
    engine.docker(
        *("build", "--quiet", "--network", "host", *options, str(context)),
        timeout=1800,
        env={"DOCKER_BUILDKIT": "0"},
    )


def _bootstrap_python(engine: Engine, pip_conf: str) -> None:
    """Import Debian 12 with its Python 3.11 under the official image's name."""
    if shutil.which("debootstrap") is None:
        raise EngineError("no registry answers and debootstrap is missing: apt-get install it.")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder, "root")
        packages = "python3,python3-venv,ca-certificates"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm"]
        done = subprocess.run([*command, str(root)], capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise EngineError(f"debootstrap failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        authorities = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
        inside = root / "etc/ssl/certs/ca-certificates.crt"
        inside.write_bytes(authorities.read_bytes())
        (root / "etc/pip.conf").write_text(pip_conf)
        tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        imported = subprocess.run(
            [
                *("docker", "import", "-c", "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt"),
                *("-", PYTHON),
            ],
            env={**os.environ, **engine.env},
            stdin=tar.stdout,
            capture_output=True,
            text=True,
        )
        if tar.wait() or imported.returncode:
            raise EngineError(f"docker import failed:\n{imported.stderr}")


@contextlib.contextmanager
def pip_configuration() -> Iterator[str]:
    """The text of a pip.conf with the package sources that this machine's pip is configured with.

    Sources on this machine's disk are served on loopback meanwhile: a build with the host's network
    reaches them there.
    """
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    sources: dict[str, list[str]] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in ("index-url", "extra-index-url", "find-links", "trusted-host"):
            sources.setdefault(name, []).extend(ast.literal_eval(value).split())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        handler = functools.partial(_Quiet, directory=str(folder))
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        stack.callback(server.server_close)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)

        def reachable(source: str) -> str:
            path = Path(urlsplit(source).path)
            if not (source.startswith(("file:", "/")) and path.is_dir()):
                return source
            # Its parent: an index's pages point to files beside it.
            name = f"{len(list(folder.iterdir()))}"
            (folder / name).symlink_to(path.parent)
            return f"http://127.0.0.1:{server.server_port}/{name}/{path.name}"

        lines = ["[global]", "timeout = 180"]
        sources.setdefault("trusted-host", []).append("127.0.0.1")
        for name, values in sources.items():
            lines.append(f"{name} =")
            lines += [f"    {value}" for value in dict.fromkeys(map(reachable, values))]
        yield "\n".join(lines) + "\n"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """No line per request."""
