"""Messages between the main process and the processes that it starts."""

from __future__ import annotations

import os
import threading

import pytest

from gpuload.workers import protocol
from gpuload.workers.protocol import receive_request, send_request, socket_pair


def fill_queue(requests) -> int:
    """Send requests until the kernel's queue is full. Return how many it holds."""
    count = 0
    while True:
        try:
            send_request(requests, count, [])
        except BlockingIOError:
            return count
        count += 1


@pytest.fixture
def channel():
    requests, received = socket_pair()
    requests.setblocking(False)
    with requests, received:
        yield requests, received


def test_send_request_waits_until_a_full_queue_is_received(channel, monkeypatch):
    requests, received = channel
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "SEND_S", 0.0)
        count = fill_queue(requests)
    details: list = []
    thread = threading.Thread(target=lambda: details.extend(receive_request(received)[0] for _ in range(count + 1)))
    descriptor = os.open("/dev/null", os.O_RDONLY)
    timer = threading.Timer(0.1, thread.start)
    timer.start()
    send_request(requests, "last", [descriptor])
    os.close(descriptor)
    timer.join()
    thread.join(60)
    assert details == [*range(count), "last"]


def test_send_request_with_a_full_queue_raises_if_the_other_end_closes(channel, monkeypatch):
    requests, received = channel
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "SEND_S", 0.0)
        fill_queue(requests)
    timer = threading.Timer(0.1, received.close)
    timer.start()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_request(requests, "last", [])
    timer.join()
